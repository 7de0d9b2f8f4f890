"""Gemma 3 from its 4-bit file draws the ids that `transformers` draws in float32 with the same weights.

One prompt is longer than the window of 512 tokens. `scripts/golden_gemma3.py` wrote the ids, and by how much each was
the best: 0.0044 in the closest case.
"""

from __future__ import annotations

from pathlib import Path

import msgspec
import numpy as np
from e2e.asking import asking

from headrace.ops.models.architectures import read_config
from headrace.ops.weights.gguf import GgufFile
from headrace.sched.messages import SamplingParams
from headrace.server.chat import Chat, TextModel

DATA = Path(__file__).parents[1] / "data" / "gemma-3-270m-q4_k_m.json"
TEMPLATE = """{{ bos_token }}{% for message in messages %}<start_of_turn>\
{{ 'model' if message['role'] == 'assistant' else message['role'] }}
{{ message['content'] | trim }}<end_of_turn>
{% endfor %}{% if add_generation_prompt %}<start_of_turn>model
{% endif %}"""


class Case(msgspec.Struct):
    prompt: str
    prompt_ids: list[int]
    greedy_ids: list[int]


class Golden(msgspec.Struct):
    cases: list[Case]


CASES = msgspec.json.decode(DATA.read_bytes(), type=Golden).cases


async def test_the_ids_are_the_references_alone_and_batched_from_the_cache(gemma_file: Path) -> None:
    window = 512
    assert max(len(case.prompt_ids) for case in CASES) > window
    sampling = SamplingParams(max_tokens=len(CASES[0].greedy_ids), temperature=0.0)
    for kernels in ("torch", "compiled"):
        async with asking(gemma_file, cpu_kernels=kernels, chunked_prefill_size=128) as asker:
            for case in CASES:
                assert await asker.outputs(np.array(case.prompt_ids, np.int32), [sampling]) == [case.greedy_ids]
            again = [asker.submit(np.array(case.prompt_ids, np.int32), sampling) for case in CASES]
            for handle, case in zip(again, CASES):
                assert await asker.ended(handle) == case.greedy_ids
            assert max(asker.cached[handle] for handle in again) > window
            assert asker.deepest == 2


def test_its_windows_theta_and_tensors_are_read(gemma_file: Path) -> None:
    with GgufFile.open(gemma_file) as file:
        config = read_config(file)
    assert [layer for layer in range(config.layers) if not config.window(layer)] == [5, 11, 17]
    assert config.window(0) == 512
    assert (config.rope_of(0).theta, config.rope_of(5).theta) == (1e4, 1e6)
    assert config.parameters == 268_098_176 and config.tied_embeddings
    assert not config.not_compiled


def test_gemmas_conversations_have_their_control_tokens(gemma_file: Path) -> None:
    # The file is the base model's and has no template; Gemma's own is this one.
    model = TextModel.load(gemma_file, TEMPLATE)
    template = model.required_template()
    chat = Chat([{"role": "user", "content": "Hi <end_of_turn> there"}])

    ids = model.tokenizer.encode_parts(template.parts(template.render(chat))).tolist()

    assert model.tokenizer.decode(ids, skip_special_tokens=False) == (
        "<bos><start_of_turn>user\nHi <end_of_turn> there<end_of_turn>\n<start_of_turn>model\n"
    )
    assert [index for index in ids if model.tokenizer.is_control(index)] == [2, 105, 106, 105]
    assert 106 in model.tokenizer.stop_ids
