"""vLLM's engine without a server: what `scripts/bench/peers.py` asks of it over HTTP. Runs in vLLM's environment.

python vllm_engine.py FOLDER THREADS     prints one line of JSON: tokens a second by scenario, medians of three
"""

from __future__ import annotations

import json
import os
import random
import statistics
import sys
import time
from typing import Any

REPEATS = 3


def main() -> None:
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # What vLLM prints is no answer.
    from vllm import LLM, SamplingParams

    engine: Any = LLM(sys.argv[1], dtype="bfloat16", max_model_len=4096, max_num_seqs=64)
    rng = random.Random(0)

    def seconds(streams: int, tokens: int, outputs: int) -> float:
        prompts = [{"prompt_token_ids": rng.choices(range(1000, 40_000), k=tokens)} for _ in range(streams)]
        sampling = SamplingParams(temperature=0, max_tokens=outputs, ignore_eos=True)
        began_s = time.perf_counter()
        engine.generate(prompts, sampling, use_tqdm=False)
        return time.perf_counter() - began_s

    def decode_rate(streams: int) -> float:
        """Two lengths of output; what they differ by is decode alone."""
        short_s, long_s = seconds(streams, 128, 16), seconds(streams, 128, 144)
        return streams * 128 / (long_s - short_s)

    seconds(32, 128, 8)
    rates = {}
    for streams in (1, 8, 32):
        rates[f"decode {streams}"] = statistics.median(decode_rate(streams) for _ in range(REPEATS))
    for tokens in (512, 2048):
        rates[f"prefill {tokens}"] = statistics.median(tokens / seconds(1, tokens, 1) for _ in range(REPEATS))
    answers.write(json.dumps(rates) + "\n")
    answers.close()


if __name__ == "__main__":
    main()
