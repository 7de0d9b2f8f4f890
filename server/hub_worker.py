"""Fetches a model from the Hugging Face Hub: `python -P -m headrace.server.hub_worker --parent PID ORG/NAME REVISION`.

Of a repository only the files that a server reads are asked for: never pickled weights, code, or the same weights in
another format. The config comes first, so that a model that can't be served is refused before its weights are fetched.

in     the arguments; the hub; the hub's cache
out    lines of JSON, see `hub.Report`
state  none but the cache's
owner  `hub.fetch_from_hub`, which started it
ready  when it says `Fetched`
end    it dies with its parent
"""

from __future__ import annotations

import argparse
import errno
import shutil
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import FIRST_EXCEPTION, ThreadPoolExecutor, wait
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Final, TypeAlias

import huggingface_hub
import msgspec
from huggingface_hub import constants, errors
from huggingface_hub.file_download import repo_folder_name

from headrace.ops.child import die_with_parent
from headrace.ops.models.architectures import check_folder_config
from headrace.ops.models.keys import UnsupportedModel
from headrace.ops.weights.folder import CONFIG, INDEX, WEIGHTS, indexed_parts
from headrace.ops.weights.gguf import BadModelFile
from headrace.server.folder_text import GENERATION, TEMPLATE, TOKENIZER, TOKENIZER_CONFIG
from headrace.server.hub import Fetched, Progressed, Refused, Report
from headrace.server.models import HubModel

Tell: TypeAlias = Callable[[Report], None]

SMALL_FILES: Final = (CONFIG, TOKENIZER, TOKENIZER_CONFIG, TEMPLATE, GENERATION)
_INFO_TIMEOUT_S: Final = 10.0
_FILES_AT_ONCE: Final = 4
_POLL_S: Final = 0.2
_NO_SPACE: Final = (errno.ENOSPC, errno.EDQUOT)
_HTTP_PACKAGES: Final = ("httpx", "httpx2", "httpcore", "requests", "urllib3")
"""What the package has sent its requests with; their errors have no ancestor in common."""


class CanNot(Exception):
    """The model can't be had; the message is for the user."""


class Unreachable(Exception):
    """The hub gave no answer; the message says why not."""


class Fetch:
    """One model's."""

    def __init__(self, model: HubModel, tell: Tell) -> None:
        self._model = model
        self._tell = tell
        self._hub = huggingface_hub.HfApi()
        self._cache = Path(constants.HF_HUB_CACHE)
        self._blobs = self._cache / repo_folder_name(repo_id=model.name, repo_type="model") / "blobs"

    def run(self) -> Path:
        """The folder. Raises CanNot, UnsupportedModel, BadModelFile, OSError."""
        model, known = self._model, self._known()
        if known is not None and known.name == model.revision:
            return known  # a commit never changes
        try:
            commit, sizes = self._listed(model.revision)
            folder = self._file(CONFIG, model.revision)
        except Unreachable as error:
            if known is None:
                raise CanNot(
                    f"{str(model)!r} is neither here nor in the hub's cache {self._cache}, and the Hugging Face Hub "
                    f"({constants.ENDPOINT}) can't be asked: {error}. Go online, or fetch the model elsewhere and "
                    "give its folder"
                ) from error
            self._tell(Progressed(f"the Hugging Face Hub can't be asked: {error}. Taking {known}, fetched before"))
            return known
        if folder.name != commit:  # a commit came between the two questions
            commit, sizes = self._listed(folder.name)
        check_folder_config(folder)
        self._tell(Progressed(f"{model} is commit {commit}"))
        names = [name for name in SMALL_FILES if name in sizes]
        if WEIGHTS in sizes:
            weights = [WEIGHTS]
        else:
            weights = sorted(indexed_parts(self._file(INDEX, commit)))
            if missing := [name for name in weights if name not in sizes]:
                raise CanNot(f"{model} lacks {missing[0]}, which its {INDEX} names: tell its makers")
        self._fetch([*names, *weights], commit, sizes)
        return folder

    def _known(self) -> Path | None:
        """The folder, if all of it was fetched before."""
        found = huggingface_hub.try_to_load_from_cache(self._model.name, CONFIG, revision=self._model.revision)
        if not isinstance(found, str):
            return None
        folder = Path(found).parent
        try:
            weights = [WEIGHTS] if (folder / WEIGHTS).exists() else list(indexed_parts(folder))
        except BadModelFile:
            return None
        return folder if all((folder / name).exists() for name in (TOKENIZER, *weights)) else None

    def _listed(self, revision: str) -> tuple[str, dict[str, int]]:
        """The commit, and its files with their sizes, among which is what can be served."""
        with self._asking():
            info = self._hub.model_info(
                self._model.name, revision=revision, files_metadata=True, timeout=_INFO_TIMEOUT_S
            )
        sizes = {file.rfilename: file.size or 0 for file in info.siblings or ()}
        _check(self._model, sizes)
        return info.sha or revision, sizes

    def _file(self, name: str, revision: str) -> Path:
        """The folder with the file in it."""
        with self._asking():
            return Path(huggingface_hub.hf_hub_download(self._model.name, name, revision=revision)).parent

    def _fetch(self, names: Sequence[str], commit: str, sizes: Mapping[str, int]) -> None:
        """Some at a time, with reports of the bytes that are there."""
        cached = huggingface_hub.try_to_load_from_cache
        missing = [name for name in names if not isinstance(cached(self._model.name, name, revision=commit), str)]
        total_bytes = sum(sizes[name] for name in missing)
        self._check_room(total_bytes)
        had_bytes = self._stored_bytes()
        # The largest last would be alone at the end.
        missing.sort(key=lambda name: -sizes[name])
        with ThreadPoolExecutor(_FILES_AT_ONCE) as threads:
            waiting = {threads.submit(self._file, name, commit) for name in missing}
            try:
                while waiting:
                    done, waiting = wait(waiting, _POLL_S, FIRST_EXCEPTION)
                    for each in done:
                        each.result()
                    got_bytes = min(self._stored_bytes() - had_bytes, total_bytes) if waiting else total_bytes
                    self._tell(Progressed("downloading", max(got_bytes, 0), total_bytes))
            except BaseException:
                threads.shutdown(wait=False, cancel_futures=True)
                raise

    def _check_room(self, needed_bytes: int) -> None:
        place = next(folder for folder in (self._cache, *self._cache.parents) if folder.exists())
        free_bytes = shutil.disk_usage(place).free
        if free_bytes < needed_bytes:
            raise CanNot(
                f"{self._model} needs {needed_bytes >> 20} MiB more, the disk of the hub's cache {self._cache} has "
                f"{free_bytes >> 20} MiB left. Make room, or set HF_HOME elsewhere"
            )

    def _stored_bytes(self) -> int:
        """Of files of the model, whole or growing."""
        total_bytes = 0
        for path in self._blobs.glob("*"):
            with suppress(FileNotFoundError):  # renamed while we look
                total_bytes += path.stat().st_size
        return total_bytes

    @contextmanager
    def _asking(self) -> Iterator[None]:
        """The package's errors as ours. Raises CanNot, Unreachable."""
        name, revision = self._model
        try:
            yield
        except errors.GatedRepoError as error:
            raise CanNot(
                f"{name} is gated: its makers give it to whoever accepts their conditions. Do so at "
                f"{constants.ENDPOINT}/{name}, and set HF_TOKEN to your token (or run hf auth login)"
            ) from error
        except errors.RepositoryNotFoundError as error:
            raise CanNot(
                f"{name!r} is no file or folder here, and no model on {constants.ENDPOINT}. If it is private there, "
                "set HF_TOKEN to a token that may read it (or run hf auth login)"
            ) from error
        except errors.RevisionNotFoundError as error:
            raise CanNot(f"{name} has no branch, tag or commit {revision!r} on {constants.ENDPOINT}") from error
        except errors.HfHubHTTPError as error:
            status = error.response.status_code
            if status >= 500 or status == 429:
                raise Unreachable(f"it answers {status}") from error
            raise CanNot(f"{constants.ENDPOINT} answers {status} for {self._model}: {_first_line(error)}") from error
        except errors.OfflineModeIsEnabled as error:
            raise Unreachable("HF_HUB_OFFLINE is set") from error
        except (errors.LocalEntryNotFoundError, ConnectionError, TimeoutError) as error:
            raise Unreachable(_first_line(error.__cause__ or error)) from error
        except Exception as error:
            if type(error).__module__.partition(".")[0] not in _HTTP_PACKAGES:
                raise
            raise Unreachable(_first_line(error)) from error


def _check(model: HubModel, sizes: Mapping[str, int]) -> None:
    """Raises CanNot for a repository that has no model in a form that can be served."""
    lacking = [name for name in (CONFIG, TOKENIZER) if name not in sizes]
    if not sizes.keys() & {WEIGHTS, INDEX}:
        lacking.append(WEIGHTS)
    if not lacking:
        return
    sentence = f"{model} can't be served: it has no {' and no '.join(lacking)}"
    if gguf := sorted(name for name in sizes if name.endswith(".gguf")):
        command = f"hf download {model.name} {gguf[0]} --local-dir FOLDER"
        raise CanNot(f"{sentence}, but GGUF files. Fetch one ({command}) and give its path")
    if WEIGHTS in lacking and any(name.endswith((".bin", ".pt", ".pth")) for name in sizes):
        raise CanNot(
            f"{sentence}, only pickled weights: reading those runs code that is in them, so headrace doesn't. Look for "
            "a revision or a model that has safetensors"
        )
    if lacking == [TOKENIZER]:
        command = f"AutoTokenizer.from_pretrained({model.name!r}).save_pretrained(FOLDER)"
        raise CanNot(
            f"{sentence}. Make one ({command} of transformers) in a folder with the other files, and give that"
        )
    raise CanNot(f"{sentence}. See docs/models.md for what is read of a folder")


def _first_line(error: BaseException) -> str:
    text = str(error).strip() or type(error).__name__
    return text.splitlines()[0][:300].rstrip(".")


def _outcome(model: HubModel, tell: Tell) -> Fetched | Refused:
    tell(Progressed(f"asking the Hugging Face Hub for {model}"))
    try:
        return Fetched(str(Fetch(model, tell).run()))
    except (CanNot, UnsupportedModel, BadModelFile) as error:
        return Refused(str(error))
    except Unreachable as error:
        return Refused(f"the Hugging Face Hub left off while {model} was fetched: {error}. Start again to go on")
    except OSError as error:
        if error.errno in _NO_SPACE:
            return Refused(f"the disk was full while {model} was fetched. Make room, or set HF_HOME elsewhere")
        return Refused(f"{model} can't be fetched: {error}. Check the hub's cache (HF_HOME)")


def main() -> int:
    """The exit code."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--parent", type=int, required=True)
    parser.add_argument("name")
    parser.add_argument("revision")
    arguments = parser.parse_args()
    die_with_parent(arguments.parent)

    def tell(report: Report) -> None:
        sys.stdout.buffer.write(msgspec.json.encode(report) + b"\n")
        sys.stdout.buffer.flush()

    tell(_outcome(HubModel(arguments.name, arguments.revision), tell))
    return 0


if __name__ == "__main__":
    sys.exit(main())
