"""Which id a peer would pick after each of some ids: greedy, teacher-forced. Two peers, each in its own environment.

    python forced.py transformers FILE.gguf THREADS     float32, from the file's dequantized weights: the reference
    python forced.py llama.cpp FILE.gguf THREADS        the file as it is

Standard input: a line of JSON, sequences of ids. Standard output: the same shape, the best id after each.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import TypeAlias

CONTEXT_TOKENS = 2048

Best: TypeAlias = Callable[[list[int]], list[int]]


def transformers(file: Path, threads: int) -> Best:
    import torch
    from bench.sides.model_files import dequantized

    torch.set_num_threads(threads)
    model = dequantized(file).eval()

    def best(ids: list[int]) -> list[int]:
        with torch.inference_mode():
            picked: list[int] = model(torch.tensor([ids])).logits[0].argmax(-1).tolist()
        return picked

    return best


def llama_cpp(file: Path, threads: int) -> Best:
    from llama_cpp import Llama

    model = Llama(
        str(file), n_ctx=CONTEXT_TOKENS, n_threads=threads, n_threads_batch=threads, logits_all=True, verbose=False
    )

    def best(ids: list[int]) -> list[int]:
        model.reset()
        model.eval(ids)
        picked: list[int] = model.scores[: len(ids)].argmax(-1).tolist()
        return picked

    return best


if __name__ == "__main__":
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # What a library prints is no answer.
    side = {"transformers": transformers, "llama.cpp": llama_cpp}[sys.argv[1]]
    picks = side(Path(sys.argv[2]), int(sys.argv[3]))
    json.dump([picks(ids) for ids in json.loads(sys.stdin.readline())], answers)
    answers.close()
