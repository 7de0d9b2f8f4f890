"""What a model's makers say of sampling, in either format, and a sentence where no request could ask for it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from ops.checkpoints import Checkpoint, Reference
from weights.conftest import WriteLlama

from headrace.ops.models.keys import UnsupportedModel
from headrace.ops.weights.files import open_model_file
from headrace.server.config import SamplingSource
from headrace.server.sampling_defaults import SamplingDefaults, sampling_defaults

QWEN3 = {"do_sample": True, "temperature": 0.6, "top_k": 20, "top_p": 0.95, "transformers_version": "4.51.0"}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    tiny = Checkpoint("tiny", "LlamaForCausalLM", {"num_hidden_layers": 1})
    return Reference(tiny, tmp_path_factory.mktemp("sampling") / "tiny").folder


def defaults(path: Path, source: SamplingSource = "model") -> SamplingDefaults:
    with open_model_file(path) as file:
        return sampling_defaults(file, source)


def says(folder: Path, config: Any) -> None:
    (folder / "generation_config.json").write_text(json.dumps(config))


def test_a_folder_says_it_in_its_generation_config(folder: Path) -> None:
    says(folder, QWEN3 | {"repetition_penalty": 1.05, "min_p": None})
    assert defaults(folder) == SamplingDefaults(temperature=0.6, top_p=0.95, top_k=20, repetition_penalty=1.05)


def test_a_gguf_says_it_in_its_metadata(write_llama: WriteLlama) -> None:
    keys = {"temp": 0.5, "top_k": 40, "top_p": 0.25, "min_p": 0.125, "penalty_repeat": 1.5}
    path = write_llama({f"general.sampling.{key}": value for key, value in keys.items()})
    assert defaults(path) == SamplingDefaults(
        temperature=0.5, top_k=40, top_p=0.25, min_p=0.125, repetition_penalty=1.5
    )


def test_what_nobody_says_is_openais(folder: Path, write_llama: WriteLlama) -> None:
    (folder / "generation_config.json").unlink(missing_ok=True)
    assert defaults(folder) == defaults(write_llama()) == SamplingDefaults()
    says(folder, {"top_k": -1, "temperature": 1})
    assert defaults(folder) == SamplingDefaults()


def test_the_models_are_left_where_openais_are_chosen(folder: Path) -> None:
    says(folder, QWEN3)
    assert defaults(folder, "openai") == SamplingDefaults()


@pytest.mark.parametrize(
    ("config", "because"),
    [
        ({"temperature": -1}, r"a temperature of -1, which can't be: .*>= 0.*--sampling-defaults openai"),
        ({"temperature": "warm"}, "a temperature of 'warm', which can't be: Expected"),
        ({"temperature": 1e-300}, "a temperature of 1e-300, which can't be: it must be 0, or a number"),
        ({"top_p": 0}, "a top_p of 0"),
        ({"top_k": 1.5}, "a top_k of 1.5"),
        ({"top_k": True}, "a top_k of True"),
        ({"repetition_penalty": 0}, "a repetition_penalty of 0"),
        ({"min_p": [0.1]}, "a min_p of a list of 1"),
    ],
)
def test_what_no_request_may_ask_for_is_refused(folder: Path, config: Any, because: str) -> None:
    says(folder, config)
    with pytest.raises(UnsupportedModel, match=f"generation_config.json' gives requests {because}"):
        defaults(folder)
    assert defaults(folder, "openai") == SamplingDefaults()


def test_a_number_that_is_none_is_refused(write_llama: WriteLlama) -> None:
    with pytest.raises(UnsupportedModel, match="a top_p of nan"):
        defaults(write_llama({"general.sampling.top_p": float("nan")}))
