"""Models of the Hugging Face Hub by their id, fetched into the hub's own cache, which other programs share.

The package `huggingface_hub` (the extra `hub`) fetches, in a child process: it brings an HTTP client and its threads,
which a server would keep for the rest of its life. It is the package that reads HF_TOKEN, HF_HOME, HF_ENDPOINT and
HF_HUB_OFFLINE.

in     an id, ORG/NAME or ORG/NAME@REVISION
out    the path of a folder that has what a server reads of the model, and nothing else
state  the hub's cache; the package's own locks let one process at a time write a file
owner  the caller, for as long as `fetch_from_hub` runs
ready  when it returns; a file has its name only when it is whole
end    the child dies with the caller; what it had of a file is fetched again
"""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Final, TypeAlias

import msgspec

from headrace.server.models import HubModel, ModelProblem, Progress


class Progressed(msgspec.Struct, frozen=True, tag=True):
    """What `Progress` takes."""

    phase: str
    done_bytes: int = 0
    total_bytes: int = 0


class Fetched(msgspec.Struct, frozen=True, tag=True):
    """The end: it is there."""

    folder: str


class Refused(msgspec.Struct, frozen=True, tag=True):
    """The end: a sentence for the user."""

    message: str


Report: TypeAlias = Progressed | Fetched | Refused
"""A line of JSON from the child."""

_decoder: Final = msgspec.json.Decoder(Report)


def fetch_from_hub(model: HubModel, progress: Progress) -> Path:
    """The model's folder, after fetching what is missing of it. Blocks: not for the event loop. Call it on the main
    thread. Raises ModelProblem."""
    if importlib.util.find_spec("huggingface_hub") is None:
        raise ModelProblem(
            f"to fetch {model.name} from the Hugging Face Hub (it is no file or folder here) takes a package that is "
            f"not installed. Run: {sys.executable} -m pip install huggingface_hub (the extra headrace[hub]); or fetch "
            "the model by other means and give its folder"
        )
    command = [sys.executable, "-P", "-m", "headrace.server.hub_worker", "--parent", str(os.getpid())]
    with tempfile.TemporaryFile() as errors:
        process = subprocess.Popen(
            [*command, model.name, model.revision],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=errors,
            # A Ctrl-C at the terminal is ours: the child would say a page about it.
            start_new_session=True,
            env={**os.environ, "HF_HUB_DISABLE_PROGRESS_BARS": "1"},
        )
        try:
            return _followed(process, progress)
        except msgspec.MsgspecError as error:
            raise _died(model, str(error)) from error
        except EOFError:
            process.wait()
            errors.seek(0)
            lines = errors.read().decode(errors="replace").strip().splitlines()
            raise _died(model, lines[-1] if lines else f"exit code {process.returncode}") from None
        finally:
            process.kill()
            process.wait()
            assert process.stdout is not None
            process.stdout.close()


def _followed(process: subprocess.Popen[bytes], progress: Progress) -> Path:
    """Raises ModelProblem; EOFError where the child ends without a last word."""
    assert process.stdout is not None
    for line in process.stdout:
        match _decoder.decode(line):
            case Progressed(phase, done_bytes, total_bytes):
                progress(phase, done_bytes, total_bytes)
            case Fetched(folder):
                return Path(folder)
            case Refused(message):
                raise ModelProblem(message)
    raise EOFError


def _died(model: HubModel, how: str) -> ModelProblem:
    return ModelProblem(
        f"fetching {model} from the Hugging Face Hub broke off: {how[:400]}. Try again, or fetch it by other means "
        f"(hf download {model.name} --local-dir FOLDER) and give the folder"
    )
