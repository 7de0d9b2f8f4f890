"""Models of the Hugging Face Hub by id: what is fetched, what is not, and a sentence for each way it can't be had.

A stand-in on loopback plays the hub; the package that talks to it is the real one, in the real child process.
"""

from __future__ import annotations

import importlib.util
import io
import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from ops.checkpoints import Checkpoint, Reference
from server.stand_in_hub import StandInHub, stand_in_hub
from text.folders import FAMILIES

from headrace.ops.models.architectures import read_config
from headrace.ops.weights.files import open_model_file
from headrace.server.config import Settings
from headrace.server.hub import fetch_from_hub
from headrace.server.launch import port_and_model
from headrace.server.models import HubModel, ModelProblem
from headrace.server.models_cli import models_command
from headrace.server.tokenizer import check_vocabulary

NAME = "small-org/Small-1.0"
MODEL = HubModel(NAME, "main")
Files = dict[str, bytes]
UNREAD = {
    "README.md": b"about",
    "pytorch_model.bin": b"pickled",
    "modeling_small.py": b"raise SystemExit('executed')",
    "onnx/model.onnx": b"another format",
    "consolidated.safetensors": b"the same weights, by other names",
    "tokenizer.model": b"sentence pieces",
}


def files_of(folder: Path) -> Files:
    return {path.name: path.read_bytes() for path in folder.iterdir()}


def make(folder: Path, max_shard_size: str) -> Files:
    checkpoint = Checkpoint("small", "LlamaForCausalLM", {"vocab_size": FAMILIES[0].build().get_vocab_size()})
    Reference(checkpoint, folder, max_shard_size)
    FAMILIES[0].write(folder)
    return files_of(folder)


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Files:
    return make(tmp_path_factory.mktemp("whole") / "model", "1GB")


@pytest.fixture(scope="module")
def in_parts(tmp_path_factory: pytest.TempPathFactory) -> Files:
    return make(tmp_path_factory.mktemp("parts") / "model", "300KB")


@pytest.fixture
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[StandInHub]:
    with stand_in_hub(tmp_path / "hf", monkeypatch) as standing:
        yield standing


def silent(phase: str, done: int, total: int) -> None:
    pass


def refusal(model: HubModel = MODEL) -> str:
    with pytest.raises(ModelProblem) as caught:
        fetch_from_hub(model, silent)
    assert model.name in str(caught.value)
    return str(caught.value)


# ---------------------------------------------------------------------------------------------------------------
# Fetching


@pytest.mark.parametrize("kind", ["whole", "in_parts"])
def test_the_files_that_are_read_are_fetched_and_no_others(
    hub: StandInHub, kind: str, request: pytest.FixtureRequest
) -> None:
    files: Files = request.getfixturevalue(kind)
    commit = hub.add(NAME, files | UNREAD)

    folder = fetch_from_hub(MODEL, silent)

    assert folder.name == commit
    assert files_of(folder) == files
    assert sorted(hub.asked) == sorted(files), "each once"
    assert len(files) > 8 if kind == "in_parts" else "model.safetensors" in files
    with open_model_file(folder) as file:
        assert read_config(file).layers == 3
        check_vocabulary(file)


def test_progress_is_in_bytes_up_to_the_whole(hub: StandInHub, in_parts: Files) -> None:
    hub.add(NAME, in_parts)
    seen: list[tuple[str, int, int]] = []

    fetch_from_hub(MODEL, lambda *said: seen.append(said))

    commit = hub.commits[NAME, "main"]
    assert [said[0] for said in seen[:2]] == [f"asking the Hugging Face Hub for {NAME}", f"{NAME} is commit {commit}"]
    counted = [said[1:] for said in seen if said[0] == "downloading"]
    # The config and the index came before: by them it is known what else there is.
    before = sum(len(in_parts[name]) for name in ("config.json", "model.safetensors.index.json"))
    total = sum(map(len, in_parts.values())) - before
    assert counted == sorted(counted) and counted[-1] == (total, total)


def test_what_is_there_is_not_fetched_again_and_what_is_new_is(hub: StandInHub, whole: Files) -> None:
    hub.add(NAME, whole)
    first = fetch_from_hub(MODEL, silent)
    hub.asked.clear()

    assert fetch_from_hub(MODEL, silent) == first
    assert hub.asked == []

    hub.add(NAME, whole | {"generation_config.json": b'{"top_k": 5}'})
    second = fetch_from_hub(MODEL, silent)
    assert second != first and hub.asked == ["generation_config.json"]


def test_a_revision_is_a_branch_a_tag_or_a_commit(hub: StandInHub, whole: Files) -> None:
    old = hub.add(NAME, whole | {"generation_config.json": b'{"top_k": 1}'}, "v1.0")
    new = hub.add(NAME, whole)

    assert fetch_from_hub(HubModel(NAME, "v1.0"), silent).name == old
    assert fetch_from_hub(HubModel(NAME, new), silent).name == new
    hub.status = 500
    assert fetch_from_hub(HubModel(NAME, new), silent).name == new, "a commit never changes: nobody is asked"


def test_a_file_that_broke_off_is_no_model_and_the_next_fetch_gets_it(hub: StandInHub, whole: Files) -> None:
    hub.add(NAME, whole)
    hub.breaks_off = {"model.safetensors"}
    refusal()
    assert hub.asked.count("model.safetensors") >= 1
    hub.status = 503
    assert "neither here nor in the hub's cache" in refusal(), "half a model is none"

    hub.breaks_off, hub.status = set(), 0

    assert files_of(fetch_from_hub(MODEL, silent)) == whole


def test_a_fetch_that_is_interrupted_leaves_no_child_behind(hub: StandInHub, whole: Files) -> None:
    hub.add(NAME, whole)

    def interrupt(phase: str, done: int, total: int) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        fetch_from_hub(MODEL, interrupt)

    asked = list(hub.asked)
    assert files_of(fetch_from_hub(MODEL, silent)) == whole
    assert sorted(asked + hub.asked[len(asked) :]) == sorted(whole)


# ---------------------------------------------------------------------------------------------------------------
# Without the hub


def test_without_the_package_it_is_said_which_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    assert "pip install huggingface_hub (the extra headrace[hub])" in refusal()


@pytest.mark.parametrize("how", ["it answers 503", "HF_HUB_OFFLINE is set", "refused"])
def test_a_hub_that_can_not_be_asked_is_named_and_what_was_fetched_is_served(
    hub: StandInHub, whole: Files, how: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    commit = hub.add(NAME, whole)
    fetch_from_hub(MODEL, silent)
    match how:
        case "it answers 503":
            hub.status = 503
        case "HF_HUB_OFFLINE is set":
            monkeypatch.setenv("HF_HUB_OFFLINE", "1")
        case "refused":
            monkeypatch.setenv("HF_ENDPOINT", "http://127.0.0.1:1")
    said: list[str] = []

    assert fetch_from_hub(MODEL, lambda phase, done, total: said.append(phase)).name == commit

    assert how in said[-1] and "fetched before" in said[-1]
    never = refusal(HubModel("small-org/never-fetched", "main"))
    assert how in never and "give its folder" in never


# ---------------------------------------------------------------------------------------------------------------
# Refusals


def test_a_model_that_is_not_there_may_be_private(hub: StandInHub) -> None:
    said = refusal(HubModel("small-org/no-such", "main"))
    assert "is no file or folder here, and no model on" in said and "set HF_TOKEN" in said


def test_a_revision_that_is_not_there_is_named(hub: StandInHub, whole: Files) -> None:
    hub.add(NAME, whole)
    assert "has no branch, tag or commit 'v9'" in refusal(HubModel(NAME, "v9"))


def test_a_gated_model_says_where_to_ask_and_opens_to_a_token(
    hub: StandInHub, whole: Files, monkeypatch: pytest.MonkeyPatch
) -> None:
    hub.add(NAME, whole)
    hub.gated.add(NAME)
    said = refusal()
    assert f"{NAME} is gated" in said and f"{hub.url}/{NAME}" in said and "HF_TOKEN" in said
    assert hub.asked == []

    monkeypatch.setenv("HF_TOKEN", "hf_accepted")
    assert files_of(fetch_from_hub(MODEL, silent)) == whole


def test_a_model_that_does_not_fit_on_the_disk_is_refused_before_it_is_fetched(hub: StandInHub, whole: Files) -> None:
    hub.add(NAME, whole)
    hub.claimed_bytes["model.safetensors"] = 1 << 60
    assert "needs 1099511627776 MiB more, the disk of the hub's cache" in refusal()
    assert hub.asked == ["config.json"]


def config(files: Files, **changes: Any) -> Files:
    return files | {"config.json": json.dumps({**json.loads(files["config.json"]), **changes}).encode()}


@pytest.mark.parametrize(
    ("changes", "because"),
    [
        ({"architectures": ["GPT2LMHeadModel"]}, "its architecture is 'GPT2LMHeadModel'"),
        ({"auto_map": {"AutoModelForCausalLM": "modeling_small.Small"}}, "nothing in a folder is ever executed"),
        ({"quantization_config": {"quant_method": "awq"}}, "quantized in a way that is not read"),
    ],
)
def test_what_can_not_be_served_is_refused_before_its_weights_are_fetched(
    hub: StandInHub, whole: Files, changes: dict[str, Any], because: str
) -> None:
    hub.add(NAME, config(whole, **changes) | UNREAD)
    with pytest.raises(ModelProblem, match=because):
        fetch_from_hub(MODEL, silent)
    assert hub.asked == ["config.json"]


@pytest.mark.parametrize(
    ("keep", "because"),
    [
        (lambda name: not name.startswith("model."), "only pickled weights: reading those runs code"),
        (lambda name: name != "tokenizer.json", r"has no tokenizer.json. Make one \(AutoTokenizer"),
        (lambda name: name not in ("model.safetensors", "pytorch_model.bin"), "has no model.safetensors. See docs"),
        (lambda name: name == "README.md", "has no config.json and no tokenizer.json and no model.safetensors"),
    ],
)
def test_a_repository_without_what_is_read_says_what_it_lacks(
    hub: StandInHub, whole: Files, keep: Callable[[str], bool], because: str
) -> None:
    hub.add(NAME, {name: content for name, content in (whole | UNREAD).items() if keep(name)})
    with pytest.raises(ModelProblem, match=because):
        fetch_from_hub(MODEL, silent)
    assert hub.asked == []


def test_a_repository_of_gguf_files_says_how_to_fetch_one(hub: StandInHub) -> None:
    hub.add(NAME, {"small.Q8_0.gguf": b"GGUF", "README.md": b"about"})
    assert f"hf download {NAME} small.Q8_0.gguf --local-dir FOLDER" in refusal()


def test_an_index_that_names_a_file_outside_is_refused(hub: StandInHub, in_parts: Files) -> None:
    index = json.dumps({"weight_map": {"lm_head.weight": "../../../.bashrc.safetensors"}}).encode()
    hub.add(NAME, in_parts | {"model.safetensors.index.json": index})
    with pytest.raises(ModelProblem, match="which is no safetensors file beside it"):
        fetch_from_hub(MODEL, silent)


# ---------------------------------------------------------------------------------------------------------------
# By the command line


def test_a_model_is_fetched_by_name_and_the_path_is_printed(hub: StandInHub, whole: Files, tmp_path: Path) -> None:
    commit = hub.add(NAME, whole)
    out, errors = io.StringIO(), io.StringIO()

    assert models_command("fetch", f"{NAME}@main", tmp_path, out=out, errors=errors) == 0

    (path,) = out.getvalue().splitlines()
    assert path.startswith(f"{NAME}@main is in {tmp_path}/hf/") and path.endswith(commit)
    assert "downloading: 1 of 1 MB" in errors.getvalue()


def test_a_server_takes_the_name_of_its_model_from_the_hub(hub: StandInHub, whole: Files) -> None:
    commit = hub.add(NAME, whole)
    settings = Settings(model_path=f"{NAME}@{commit}", port=0)

    sock, path = port_and_model(settings)

    sock.close()
    assert (settings.model_name, path.name) == (NAME, commit)


def test_a_folder_of_that_name_is_taken_before_the_hub(
    hub: StandInHub, whole: Files, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / NAME).mkdir(parents=True)
    monkeypatch.chdir(tmp_path)
    settings = Settings(model_path=NAME, port=0)

    sock, path = port_and_model(settings)

    sock.close()
    assert (settings.model_name, str(path), hub.asked) == ("Small-1.0", NAME, [])
