"""A Hugging Face folder, served by the command line, answers over HTTP with the ids that `transformers` draws from it.

The folder is as one from the hub: weights in parts with an index, a tokenizer, a chat template and a generation config.
"""

from __future__ import annotations

import asyncio
import json
import shutil
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
import transformers
from e2e.served import Served, serving
from ops.checkpoints import LLAMA3, Checkpoint, Reference
from server.stand_in_hub import stand_in_hub
from text.folders import FAMILIES, TEMPLATE

FAMILY = FAMILIES[0]
OUTPUTS = 40
MESSAGES = [{"role": "user", "content": "The quick brown fox jumps over the lazy dog. Größe, 你好!"}]
WITH_DETAILS = {"return_cached_tokens_details": True}
EVERY_PAGE = json.dumps({"prefetch_threshold": 1, "lookup_timeout_s": 10, "transfer_timeout_s": 60})
PROMPT = "Is it? The lazy dog's 1234 tails, and the quick brown fox's: naïve."


class Folder:
    """A folder to serve, and `transformers` on the same files."""

    def __init__(self, path: Path) -> None:
        self.path = path
        vocab = FAMILY.build().get_vocab_size()
        checkpoint = Checkpoint(path.name, "LlamaForCausalLM", {"vocab_size": vocab, "rope_parameters": LLAMA3})
        Reference(checkpoint, path, max_shard_size="100KB")
        FAMILY.write(path)
        (path / "chat_template.jinja").write_text(TEMPLATE)
        self.says()
        self.tokenizer: Any = transformers.AutoTokenizer.from_pretrained(path)

    def says(self, **generation: Any) -> None:
        """What generation_config.json says."""
        (self.path / "generation_config.json").write_text(json.dumps(generation))

    def prompt_ids(self) -> list[int]:
        return list(self.tokenizer(PROMPT)["input_ids"])

    def chat_ids(self) -> list[int]:
        given = self.tokenizer.apply_chat_template(MESSAGES, add_generation_prompt=True, return_dict=True)
        return list(given["input_ids"])

    def greedy(self, ids: Sequence[int], **changed: Any) -> list[int]:
        """What `generate` gives by the folder's generation config, without sampling."""
        model: Any = transformers.AutoModelForCausalLM.from_pretrained(self.path, dtype=torch.float32)
        given = torch.tensor([list(ids)])
        mask = torch.ones_like(given)
        out = model.generate(given, attention_mask=mask, do_sample=False, max_new_tokens=OUTPUTS, **changed)
        return list(out[0, len(ids) :].tolist())

    def bytes_of(self, ids: Sequence[int]) -> list[bytes]:
        """Of each id, by the vocabulary and the alphabet of tokenizer.json: no two ids have the same."""
        texts = self.tokenizer.convert_ids_to_tokens(list(ids))
        return [bytes(ALPHABET[char] for char in text) for text in texts]


def _alphabet() -> dict[str, int]:
    """GPT-2's: which byte each character of a byte-level token stands for."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in printable]
    return {chr(byte): byte for byte in printable} | {chr(256 + at): byte for at, byte in enumerate(others)}


ALPHABET = _alphabet()


class Answer(NamedTuple):
    tokens: list[bytes]
    cached_tokens: int
    from_storage: int
    finish_reason: str
    prompt_tokens: int


async def complete(server: Served, **fields: Any) -> Answer:
    asked = {"prompt": PROMPT, "max_tokens": OUTPUTS, "logprobs": 0, **WITH_DETAILS, **fields}
    answer = await server.post("/v1/completions", **asked)
    texts = answer["choices"][0]["logprobs"]["tokens"]
    return answered(answer, [read(text) for text in texts])


def read(text: str) -> bytes:
    """A token that is no whole character is written byte by byte."""
    return bytes.fromhex(text[6:].replace("\\x", "")) if text.startswith("bytes:") else text.encode()


async def chat(server: Served, **fields: Any) -> Answer:
    asked = {"messages": MESSAGES, "max_tokens": OUTPUTS, "logprobs": True, **WITH_DETAILS, **fields}
    answer = await server.post("/v1/chat/completions", **asked)
    return answered(answer, [bytes(score["bytes"]) for score in answer["choices"][0]["logprobs"]["content"]])


def answered(answer: Any, tokens: list[bytes]) -> Answer:
    details, usage = answer["sglext"]["cached_tokens_details"], answer["usage"]
    cached = usage["prompt_tokens_details"]["cached_tokens"]
    finish_reason = answer["choices"][0]["finish_reason"]
    return Answer(tokens, cached, details["storage"], finish_reason, usage["prompt_tokens"])


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Folder:
    return Folder(tmp_path_factory.mktemp("hub") / "Small-Random")


async def test_ids_are_those_of_transformers_cold_cached_and_after_a_restart(folder: Folder, tmp_path: Path) -> None:
    assert len(list(folder.path.glob("model-*.safetensors"))) > 1
    prompt, conversation = folder.prompt_ids(), folder.chat_ids()
    expected = [folder.bytes_of(folder.greedy(ids)) for ids in (prompt, conversation)]
    assert min(len(set(tokens)) for tokens in expected) > 8, "a model that repeats itself proves little"
    tiers = ["--disk-cache-dir", str(tmp_path / "kv"), "--hicache-storage-prefetch-policy", "wait_complete"]
    tiers += ["--hicache-storage-backend-extra-config", EVERY_PAGE]

    async def asked(server: Served) -> list[Answer]:
        answers = [await complete(server, temperature=0), await chat(server, temperature=0)]
        assert [answer.tokens for answer in answers] == expected
        assert [answer.prompt_tokens for answer in answers] == [len(prompt), len(conversation)]
        return answers

    async with serving(folder.path, tmp_path / "log", *tiers) as server:
        cold, cached = await asked(server), await asked(server)
        assert [model["id"] for model in (await server.get("/v1/models"))["data"]] == ["Small-Random"]
    async with serving(folder.path, tmp_path / "log", *tiers) as server:
        restarted = await asked(server)

    assert [answer.cached_tokens for answer in cold] == [0, 0]
    assert [answer.cached_tokens for answer in cached] == [16, 16]
    assert [answer.from_storage for answer in restarted] == [16, 16]


async def test_the_generation_config_says_what_ends_a_text_and_how_it_is_drawn(folder: Folder, tmp_path: Path) -> None:
    folder.says()
    plain = folder.greedy(folder.prompt_ids(), repetition_penalty=1.4)
    eot = folder.tokenizer.convert_tokens_to_ids(FAMILY.eos)
    drawn = {"do_sample": True, "temperature": 0.6, "top_p": 0.9, "top_k": 12, "repetition_penalty": 1.4}
    folder.says(**drawn, eos_token_id=[eot, plain[11]])
    expected = folder.bytes_of(folder.greedy(folder.prompt_ids()))
    assert expected == folder.bytes_of(plain)[:12], "transformers ends there too"

    async with serving(folder.path, tmp_path / "log") as server:
        greedy = await complete(server, temperature=0)
        seeded = {"seed": 7, "ignore_eos": True}
        silent, spoken = await complete(server, **seeded), await complete(server, **seeded, **drawn)
        openais = await complete(server, **seeded, temperature=1, top_p=1, top_k=-1, repetition_penalty=1)
        info = await server.get("/server_info")

    assert (greedy.tokens, greedy.finish_reason) == (expected, "stop")
    assert silent.tokens == spoken.tokens != openais.tokens
    assert silent.finish_reason == "length"
    assert info["sampling_defaults"] == "model"
    assert info["default_sampling_params"] == {
        "temperature": 0.6,
        "top_p": 0.9,
        "top_k": 12,
        "min_p": 0.0,
        "repetition_penalty": 1.4,
    }
    assert "the model's temperature 0.6, top_p 0.9, top_k 12, repetition_penalty 1.4" in (tmp_path / "log").read_text()


async def test_code_in_a_folder_is_never_run_even_where_the_server_is_started_in_it(
    folder: Folder, tmp_path: Path
) -> None:
    model, mark = Path(shutil.copytree(folder.path, tmp_path / "model")), tmp_path / "executed"
    # Some are named as what the server itself imports, some as what transformers would run, or unpickle.
    for name in ("torch", "tokenizers", "sched", "sitecustomize", "modeling_llama", "configuration_llama", "__init__"):
        (model / f"{name}.py").write_text(f"import pathlib; pathlib.Path({str(mark)!r}).touch()")
    for name in ("pytorch_model.bin", "training_args.bin"):
        (model / name).write_bytes(f"cposix\nsystem\n(S'touch {mark}'\ntR.".encode())  # a pickle that runs a command

    async with serving(".", tmp_path / "log", cwd=model) as server:
        assert (await complete(server, temperature=0, max_tokens=4)).tokens

    assert not mark.exists()
    sprung = await asyncio.create_subprocess_exec(sys.executable, model / "torch.py")
    assert await sprung.wait() == 0
    assert mark.exists(), "the trap works"


async def test_a_model_of_the_hub_is_served_by_its_id(
    folder: Folder, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with stand_in_hub(tmp_path / "hf", monkeypatch) as hub:
        hub.add("small-org/Small", {path.name: path.read_bytes() for path in folder.path.iterdir()})
        async with serving("small-org/Small", tmp_path / "log") as server:
            names = [model["id"] for model in (await server.get("/v1/models"))["data"]]
            answer = await complete(server, temperature=0)

    assert names == ["small-org/Small"]
    assert answer.tokens == folder.bytes_of(folder.greedy(folder.prompt_ids()))
