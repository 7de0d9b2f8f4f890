"""`headrace cache`: what is in a directory of the disk tier, is it sound, taking pages out. No server is needed.

`ls`, `stat` and `verify` only read, also while a server has the directory, and show what can be read of a damaged one.
A directory knows models and salts by their hashes only: a salt is found by hashing it for each model in there.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, Literal, TextIO, TypeAlias, get_args

from headrace.server.config import BadSetting
from headrace.server.progress import Progress
from headrace.server.sizing import size_text

if TYPE_CHECKING:
    # Only to check types: numpy and the store take 0.1 s to import, which the other commands need not pay.
    from headrace.kvcache.storage.disk.inspect import SpaceSummary, Summary

Action: TypeAlias = Literal["ls", "stat", "verify", "rm"]

FAULTS: Final = 1
"""Exit code: damage was found, or what was asked could not be done."""
_SHOWN_BAD: Final = 20
_EXIT_CODES: Final = "Exit codes: 0 all is well, 1 damage or a directory that can't be used, 2 a wrong command line."
_SALT_HELP: Final = (
    "only the pages of requests with this cache_salt, '' for those without one. With several API keys the salt is "
    "TENANT:SALT or TENANT, the first 32 hex digits of the key's SHA-256."
)
_ACTIONS: Final[dict[Action, str]] = {
    "ls": "list the models and salts that have pages, by their hashes",
    "stat": "say what is in the directory as a whole, and who uses it",
    "verify": "read every page and check it; changes nothing",
    "rm": "delete pages: all, or those of a model or a salt; the server must have stopped",
}


def add_cache_parser(commands: Any, formatter: type[argparse.HelpFormatter]) -> None:
    """The command's part of the command line."""
    cache = commands.add_parser(
        "cache",
        help="look into a disk cache, check it, delete from it",
        description="The pages that --disk-cache-dir keeps.",
        epilog=_EXIT_CODES,
        formatter_class=formatter,
    )
    actions = cache.add_subparsers(dest="action", metavar="ACTION", required=True)
    for action, what in _ACTIONS.items():
        parser = actions.add_parser(
            action,
            help=what,
            description=what[0].upper() + what[1:] + ".",
            epilog=_EXIT_CODES,
            formatter_class=formatter,
        )
        parser.add_argument("--disk-cache-dir", metavar="DIR", help="the directory. Default: `kv` in HEADRACE_CACHE.")
        if action in ("ls", "rm"):
            parser.add_argument("--salt", metavar="SALT", help=_SALT_HELP)
            parser.add_argument(
                "--model", metavar="HEX", help="only pages of this model, as `ls` names it; a beginning will do."
            )


def cache_command(flags: dict[str, Any], cache: Path, out: TextIO | None = None, errors: TextIO | None = None) -> int:
    """Results go to `out`, progress and problems to `errors`; the exit code. Raises BadSetting."""
    from headrace.kvcache.storage.page_store import StoreRefused

    out, errors = out or sys.stdout, errors or sys.stderr
    named = flags.get("disk_cache_dir")
    directory = str(cache / "kv") if named is None else os.path.abspath(Path(named).expanduser())
    command = _Command(directory, cache, flags.get("salt"), flags.get("model"), out, errors)
    run: dict[str, Callable[[], int]] = {
        "ls": command.list_spaces,
        "stat": command.stat,
        "verify": command.verify,
        "rm": command.remove,
    }
    assert set(run) == set(get_args(Action))
    try:
        return run[flags["action"]]()
    except StoreRefused as refusal:
        return command.refuse(str(refusal))


class _Command:
    def __init__(
        self, directory: str, cache: Path, salt: str | None, model: str | None, out: TextIO, errors: TextIO
    ) -> None:
        self._directory = directory
        self._cache = cache
        self._salt = salt
        self._model = model
        self._out = out
        self._errors = errors

    def refuse(self, message: str) -> int:
        print(f"headrace: {message}", file=self._errors)
        return FAULTS

    def list_spaces(self) -> int:
        found = self._summary()
        spaces = self._chosen(found)
        rows = [("MODEL", "NAMESPACE", "PAGES", "SIZE")]
        rows += [(space.model, space.namespace, str(space.pages), size_text(space.size_bytes)) for space in spaces]
        widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
        for row in rows:
            print("  ".join(cell.ljust(width) for cell, width in zip(row, widths)).rstrip(), file=self._out)
        if not spaces and (self._salt is not None or self._model is not None):
            print("no pages of these are here", file=self._errors)
        return self._faults(found.faults)

    def stat(self) -> int:
        found = self._summary()
        models = {space.model for space in found.spaces}
        lines = {
            "directory": found.directory,
            "format": str(found.format) if found.format else "unknown",
            "in use by": f"{found.in_use_by}: read-only until it stops" if found.in_use_by else "nobody",
            "files": f"{size_text(found.size_bytes)} in {found.segments} segments",
            "pages": f"{found.pages} in {found.slots} slots",
            "models": str(len(models)),
            "namespaces": str(len(found.spaces)),
        }
        if found.foreign:
            lines["other files"] = ", ".join(ascii(name)[1:-1] for name in found.foreign[:_SHOWN_BAD])
        width = max(map(len, lines))
        for name, value in lines.items():
            print(f"{name.ljust(width)}  {value}", file=self._out)
        return self._faults(found.faults)

    def verify(self) -> int:
        from headrace.kvcache.storage.disk.inspect import verify

        with Progress(self._errors) as progress:
            found = verify(self._directory, progress)
        for bad in found.bad[:_SHOWN_BAD]:
            print(f"{bad.file}, slot {bad.slot}: {bad.what}", file=self._out)
        if len(found.bad) > _SHOWN_BAD:
            print(f"… and {len(found.bad) - _SHOWN_BAD} more", file=self._out)
        changed = f", {found.changed} written anew by the server meanwhile" if found.changed else ""
        print(f"{found.pages} pages: {found.good} good, {len(found.bad)} bad{changed}", file=self._out)
        if found.bad:
            print(
                "A bad page is never served: it is found when it is read, and counts as missing. `headrace cache rm` "
                "deletes all pages.",
                file=self._errors,
            )
        return self._faults(found.faults) or (FAULTS if found.bad else 0)

    def remove(self) -> int:
        from headrace.kvcache.storage.disk.inspect import remove

        found = self._summary()
        if found.in_use_by:
            return self.refuse(
                f"{self._directory} is in use by {found.in_use_by}, and read-only until it stops: stop the server, or "
                "have it delete by POST /cache/clear or /flush_cache?tier=storage"
            )
        chosen: list[tuple[bytes | None, bytes | None]] = [(None, None)]
        if self._salt is not None or self._model is not None:
            chosen = [(bytes.fromhex(one.model), bytes.fromhex(one.namespace)) for one in self._chosen(found)]
        pages = size_bytes = 0
        messages: list[str] = []
        with Progress(self._errors) as progress:
            for done, (model, namespace) in enumerate(chosen, 1):
                removed = remove(self._directory, model, namespace, progress)
                pages, size_bytes = pages + removed.pages, size_bytes + removed.size_bytes
                messages += [removed.message] if removed.message else []
                progress("namespaces deleted", done, len(chosen))
        print(f"{pages} pages deleted, {size_text(size_bytes)}", file=self._out)
        return self._faults(messages)

    # -----------------------------------------------------------------------------------------------------------

    def _summary(self) -> Summary:
        from headrace.kvcache.storage.disk.inspect import summary

        with Progress(self._errors) as progress:
            return summary(self._directory, progress)

    def _chosen(self, found: Summary) -> list[SpaceSummary]:
        """The namespaces that --model and --salt name."""
        spaces = found.spaces
        if self._model is not None:
            wanted = self._model.lower()
            spaces = [space for space in spaces if space.model.startswith(wanted)]
            if len({space.model for space in spaces}) > 1:
                raise BadSetting(f"--model {self._model} is the beginning of several models: give more digits.")
        if self._salt is not None:
            hashes = self._hashes({space.model for space in spaces}, self._salt)
            spaces = [space for space in spaces if space.namespace in hashes]
        return spaces

    def _hashes(self, models: set[str], salt: str) -> set[str]:
        """The namespaces that a salt has in these models, under every page hash there is."""
        from headrace.kvcache.identity import PageHash, namespace
        from headrace.server.salt_key import FILE_NAME, salt_key

        key = b""
        if salt:
            if not (self._cache / FILE_NAME).is_file():
                raise BadSetting(
                    f"--salt {salt}: salts are stored only as hashes under a key, and there is none in {self._cache}: "
                    "set HEADRACE_CACHE to the cache folder of the server that wrote the pages."
                )
            try:
                key = salt_key(self._cache)
            except OSError as error:
                raise BadSetting(f"The salt key in {self._cache} can't be read: {error.strerror}.") from error
        # Without a salt the key plays no part.
        hashes: Sequence[PageHash] = get_args(PageHash)
        return {namespace(bytes.fromhex(model), "", salt, key, by).hex() for model in models for by in hashes}

    def _faults(self, faults: Sequence[str]) -> int:
        for fault in faults:
            print(f"headrace: {self._directory}: {fault}", file=self._errors)
        return FAULTS if faults else 0
