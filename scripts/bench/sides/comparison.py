"""From samples to tables: rates with their spread, ratios with their bars, and what HTTP costs each side."""

from __future__ import annotations

import json
import statistics
from collections.abc import Iterable, Mapping
from typing import Any, Final, NamedTuple

import msgspec
from bench.sides.scenarios import SCENARIOS, Sample
from rich.table import Table

LLAMA: Final = "llama.cpp Q8_0"
VLLM: Final = "vLLM bf16"


class Bar(NamedTuple):
    """What a ratio must reach (or, for a time, must not pass)."""

    side: str
    scenario: str
    against: tuple[str, ...]
    """The best of these."""
    bar: float
    aim: float
    of_time: bool = False


def _rates(side: str, against: tuple[str, ...], *bars: tuple[float, float]) -> list[Bar]:
    names = [name for name in SCENARIOS if name != "shared turns"]
    return [Bar(side, name, against, *values) for name, values in zip(names, bars, strict=True)]


BARS: Final = [
    *_rates("headrace bf16", (VLLM,), (1.7, 2.0), (1.35, 1.6), (1.1, 1.3), (1.0, 1.15), (1.05, 1.25)),
    *_rates("headrace q8", (LLAMA, VLLM), (1.3, 1.5), (1.7, 2.0), (1.25, 1.45), (1.3, 1.5), (1.3, 1.5)),
    Bar("headrace bf16", "shared turns", (VLLM,), 1.7, 2.0),
    Bar("headrace bf16", "shared turns", (VLLM,), 0.5, 0.4, of_time=True),
]
"""Issue 5, point 6."""


class Report(msgspec.Struct):
    """All that was measured on one machine."""

    device: str
    versions: dict[str, str] = {}
    start_s: dict[str, float] = {}
    """From the start of the command to the first answer of its health check."""
    samples: list[Sample] = []
    in_process: dict[str, dict[str, float]] = {}
    """Tokens a second without HTTP, by side and scenario."""
    unavailable: dict[str, str] = {}


class Spread(NamedTuple):
    """A median with the lowest and the highest."""

    median: float
    lowest: float
    highest: float

    @classmethod
    def of(cls, values: Iterable[float]) -> Spread:
        values = list(values)
        return cls(statistics.median(values), min(values), max(values))

    def text(self, digits: int = 0) -> str:
        return f"{self.median:.{digits}f} ({self.lowest:.{digits}f}–{self.highest:.{digits}f})"


def compares(side: str, scenario: str) -> bool:
    """Whether a bar needs this side in this scenario. (llama.cpp computes a shared prompt once for each of its slots:
    it would take most of the time of a run, and no bar asks.)"""
    return any(bar.scenario == scenario and side in (bar.side, *bar.against) for bar in BARS)


def ratios(report: Report, bar: Bar) -> list[float]:
    """Of each repeat in which the side and all that it is held against were measured."""

    def value(sample: Sample) -> float:
        if not bar.of_time:
            return sample.tokens_per_s
        assert sample.first_token_ms is not None
        return sample.first_token_ms

    by_repeat: dict[int, dict[str, float]] = {}
    for sample in report.samples:
        if sample.scenario == bar.scenario:
            by_repeat.setdefault(sample.repeat, {})[sample.side] = value(sample)
    best = min if bar.of_time else max
    return [
        sides[bar.side] / best(sides[name] for name in bar.against)
        for sides in by_repeat.values()
        if all(name in sides for name in (bar.side, *bar.against))
    ]


def in_process_rates(side: str, said: str) -> dict[str, float]:
    """By scenario, from what a side's own bench printed or wrote."""
    if side.startswith("headrace"):
        speeds = json.loads(said)["speeds"]
        return {_of_shape(speed["decode_rows"], speed["prefill_tokens"]): speed["tokens_per_s"] for speed in speeds}
    lines = [json.loads(line) for line in said.splitlines() if line.startswith("{")]
    if side == LLAMA:
        return {_of_shape(line["pl"], 0): line["speed_tg"] for line in lines}
    rates: dict[str, float] = lines[-1]
    return rates


def _of_shape(rows: int, tokens: int) -> str:
    return f"prefill {tokens}" if tokens else f"decode {rows}"


def tables(report: Report) -> list[Table]:
    return [_rate_table(report), _bar_table(report)]


def _rate_table(report: Report) -> Table:
    table = Table(
        "side", "scenario", "repeats", "tok/s over HTTP", "first token ms", "client CPU", "in process", "loss"
    )
    table.title = report.device
    for side, version in report.versions.items():
        started = report.start_s.get(side)
        table.add_section()
        title = f"{side} ({version}){f', ready after {started:.1f} s' if started else ''}"
        for name, samples in _by_scenario(report, side).items():
            rates = Spread.of(sample.tokens_per_s for sample in samples)
            firsts = [sample.first_token_ms for sample in samples if sample.first_token_ms is not None]
            alone = report.in_process.get(side, {}).get(name)
            table.add_row(
                title,
                name,
                str(len(samples)),
                rates.text(),
                Spread.of(firsts).text() if firsts else "",
                f"{statistics.median(sample.client_cpu for sample in samples):.1%}",
                f"{alone:.0f}" if alone else "",
                f"{1 - rates.median / alone:.0%}" if alone else "",
            )
            title = ""
    return table


def _by_scenario(report: Report, side: str) -> Mapping[str, list[Sample]]:
    found: dict[str, list[Sample]] = {}
    for name in SCENARIOS:
        samples = [sample for sample in report.samples if (sample.side, sample.scenario) == (side, name)]
        if samples:
            found[name] = samples
    return found


def _bar_table(report: Report) -> Table:
    table = Table("side", "scenario", "against", "ratio", "bar", "aim", "met")
    for bar in BARS:
        found = ratios(report, bar)
        if not found:
            continue
        spread = Spread.of(found)
        name = f"{bar.scenario}, {'first token' if bar.of_time else 'tok/s'}"
        cells: list[Any] = [bar.side, name, " or ".join(bar.against), spread.text(2), bar.bar, bar.aim]
        table.add_row(*map(str, cells), verdict(bar, spread.median))
    return table


def verdict(bar: Bar, ratio: float) -> str:
    """Whether bar and aim are met."""

    def reached(wanted: float) -> bool:
        return ratio <= wanted if bar.of_time else ratio >= wanted

    return "aim" if reached(bar.aim) else "yes" if reached(bar.bar) else "NO"
