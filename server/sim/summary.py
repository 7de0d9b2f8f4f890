"""Figures of one or more replays, for people: a table with a column a run, and a picture of it."""

from __future__ import annotations

import importlib.util
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from headrace.server.config import BadSetting
from headrace.server.sim.replay import Figures, Times
from headrace.server.sim.scenario import Scenario
from headrace.server.sizing import size_text

if TYPE_CHECKING:
    from rich.table import Table


def figures_table(title: str, runs: Mapping[str, Figures], scenario: Scenario) -> Table:
    """A row a figure, a column a run."""
    from rich.table import Table  # 60 ms, which `headrace --help` need not pay

    table = Table(title=title, title_justify="left", title_style="")
    table.add_column("")
    for name in runs:
        table.add_column(name, justify="right")
    columns = [_rows(figures, scenario) for figures in runs.values()]
    for name in columns[0]:
        table.add_row(name, *(column[name] for column in columns), end_section=name in _SECTION_ENDS)
    return table


_SECTION_ENDS = ("requests", "ITL p50 / p90 / p99 ms", "output tok/s", "hit ratio, no bounds", "integrity alarms")


def _rows(figures: Figures, scenario: Scenario) -> dict[str, str]:
    hit, ended = figures.hit_ratio, f"{figures.finished} of {figures.requests}"
    if figures.refused or figures.failed:
        ended += f" ({figures.refused} refused, {figures.failed} failed)"
    objective = f"TTFT ≤ {scenario.slo_ttft_ms:g} ms, mean ITL ≤ {scenario.slo_itl_ms:g} ms"
    return {
        "requests": ended,
        "TTFT p50 / p90 / p99 ms": _three(figures.ttft_ms),
        "ITL p50 / p90 / p99 ms": _three(figures.itl_ms),
        f"goodput: {objective}": f"{figures.goodput_rps:.2f} req/s ({figures.goodput_share:.1%})",
        "requests/s": f"{figures.requests_per_s:.2f}",
        "prompt tok/s": f"{figures.prompt_tokens_per_s:.0f}",
        "output tok/s": f"{figures.output_tokens_per_s:.0f}",
        "hit ratio, device": f"{hit.device:.1%}",
        "hit ratio, host": f"{hit.host:.1%}",
        "hit ratio, storage": f"{hit.storage:.1%}",
        "hit ratio": f"{hit.total:.1%}",
        "hit ratio, no bounds": f"{hit.theoretical:.1%}",
        "prefetched for nothing": size_text(figures.prefetch_wasted_bytes),
        "prefetched too late": size_text(figures.prefetch_late_bytes),
        "waited for storage, all": f"{figures.prefetch_waited_ms / 1e3:.1f} s",
        "copied to the host": size_text(figures.copied_bytes),
        "stored": size_text(figures.stored_bytes),
        "retractions": str(figures.retractions),
        "storage restarts": str(figures.storage_restarts),
        "integrity alarms": str(figures.integrity_alarms),
        "device busy": f"{figures.device_busy_share:.1%}",
        "steps": str(figures.steps),
        "virtual time": f"{figures.virtual_s:.1f} s",
        "simulated in": f"{figures.wall_s:.1f} s ({figures.cpu_s:.1f} s of CPU)",
        "steps simulated a CPU second": f"{figures.steps_per_s:.0f}",
    }


def _three(times: Times) -> str:
    return f"{times.p50:.1f} / {times.p90:.1f} / {times.p99:.1f}"


def check_plot() -> None:
    """Raises BadSetting without matplotlib: better before the runs than after them."""
    if importlib.util.find_spec("matplotlib") is None:
        raise BadSetting("--plot needs matplotlib: `pip install matplotlib`, or leave the flag out.")


def plot(runs: Mapping[str, Figures], path: Path) -> None:
    """Hit ratio by tier, TTFT and goodput of each run, side by side."""
    from matplotlib import pyplot

    pyplot.switch_backend("Agg")
    names, all_figures = list(runs), list(runs.values())
    picture, (hits, ttft, goodput) = pyplot.subplots(1, 3, figsize=(4 + 3 * len(names), 4))
    floor = [0.0] * len(names)
    for tier in ("device", "host", "storage"):
        shares = [100 * getattr(figures.hit_ratio, tier) for figures in all_figures]
        hits.bar(names, shares, bottom=floor, label=tier)
        floor = [below + share for below, share in zip(floor, shares)]
    hits.axhline(100 * all_figures[0].hit_ratio.theoretical, color="black", linestyle="--", label="no bounds")
    hits.set_ylabel("prompt tokens reused, %")
    hits.legend()
    for offset, share in enumerate(("p50", "p90", "p99")):
        places = [at + 0.27 * (offset - 1) for at in range(len(names))]
        ttft.bar(places, [getattr(figures.ttft_ms, share) / 1e3 for figures in all_figures], 0.25, label=share)
    ttft.set_xticks(range(len(names)), names)
    ttft.set_ylabel("time to first token, s")
    ttft.legend()
    goodput.bar(names, [figures.goodput_rps for figures in all_figures])
    goodput.set_ylabel("goodput, requests/s")
    picture.tight_layout()
    picture.savefig(path, dpi=120)
    pyplot.close(picture)
