"""What clients ask of sampling has its effect on the committed output of the real model, with overlap and without."""

from __future__ import annotations

from pathlib import Path

from e2e.asking import asking

from headrace.ops.weights.gguf import GgufFile
from headrace.sched.messages import SamplingParams
from headrace.server.tokenizer import Tokenizer


async def test_b32_penalties_bias_seeds_and_minimum_act_on_the_committed_output(model_file: Path) -> None:
    with GgufFile.open(model_file) as file:
        tokenizer = Tokenizer.from_gguf_metadata(file.metadata)
    prompt = tokenizer.encode("one two one two one two")
    outputs = []
    for disable in (False, True):
        async with asking(model_file, disable_overlap_schedule=disable) as asker:
            (plain,) = await asker.outputs(prompt, [SamplingParams(24, temperature=0.0)])
            assert len(set(plain)) < 12, "the model repeats itself, so a penalty has something to change"
            stop = plain[3]
            asked = [
                SamplingParams(24, temperature=0.0, repetition_penalty=100.0),
                SamplingParams(24, temperature=0.0, frequency_penalty=2.0, presence_penalty=2.0),
                SamplingParams(24, temperature=0.0, logit_bias=((plain[0], -100.0),)),
                SamplingParams(24, temperature=0.0, stop_ids=(stop,)),
                SamplingParams(24, temperature=0.0, stop_ids=(stop,), min_tokens=12),
                SamplingParams(24, temperature=1.0, seed=1),
                SamplingParams(24, temperature=1.0, seed=1),
                SamplingParams(24, temperature=1.0, seed=2),
            ]
            got = await asker.outputs(prompt, asked)
            assert asker.deepest == (1 if disable else 2)
        repeated, penalised, biased, stopped, later, seeded, again, other = got
        # Were a penalty one id behind, as the last one is drawn while the next step runs, an id could come twice.
        assert len(set(repeated)) == len(repeated) == 24
        assert penalised != plain and max(map(penalised.count, penalised)) < max(map(plain.count, plain))
        assert plain[0] not in biased
        assert stopped == plain[: plain.index(stop) + 1]
        assert stop not in later[:12] and len(later) >= 12
        assert seeded == again != other
        outputs.append([plain, *got])
    assert outputs[0] == outputs[1]
