"""`headrace simulate`: a trace through the real scheduler and cache, in virtual time, on a device that only takes time.

The manual is in the flags below; docs/simulation.md says what the model is and what it leaves out.
"""

from __future__ import annotations

import argparse
import itertools
import logging
import sys
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, TextIO

import msgspec

from headrace.server.config import RULES, BadSetting
from headrace.server.manual import Flag, FlagTable, add_flags
from headrace.server.progress import Progress

if TYPE_CHECKING:
    # Only to check types: numpy and the engine take 0.2 s to import, which the other commands need not pay.
    from headrace.server.sim.replay import Figures
    from headrace.server.sim.scenario import Scenario

MAX_RUNS: Final = 64
"""Of one --compare."""


MANUAL: Final[FlagTable] = {
    "trace": (
        Flag("trace", "FILE", "Mooncake's JSON lines, or Azure's format where the name ends in .csv."),
        Flag("limit", "N", "Only the first N requests."),
        Flag("speed", "FACTOR", "Requests come so many times as fast. Default: 1."),
        Flag("block_tokens", "TOKENS", "Tokens that one of hash_ids stands for. Default: 512, Mooncake's."),
        Flag("seed", "N", "Of all that is drawn: latencies, hangs, damage. One seed, one outcome. Default: 0."),
    ),
    "model and device": (
        Flag(
            "model_shape",
            "NAME",
            "Whose FLOPs and bytes are counted: llama-3.1-8b (default), llama-3.1-70b, mistral-7b, qwen2.5-7b, "
            "qwen2.5-32b, smollm2-135m or smollm2-1.7b.",
        ),
        Flag("device", "NAME", "Whose FLOPs and bandwidths: h200 (default), h100, a100, l4 or cpu."),
        Flag("tp_size", "N", "So many devices, as tensor parallelism would use them. Default: 1."),
        Flag(
            "calibration",
            "FILE",
            "Costs of steps from a real server instead (`headrace serve --record-steps FILE`).",
        ),
        Flag("request_ms", "MS", "From a request's arrival to the scheduler: HTTP, tokenizing. Default: 0."),
    ),
    "memory": (
        Flag("mem_fraction_static", "FRACTION", "Of the device's memory, for weights and KV together. Default: 0.88."),
        Flag("max_total_tokens", "TOKENS", "Size of the KV cache. Default: from --mem-fraction-static."),
        Flag("context_length", "TOKENS", "Longest prompt plus output; longer requests are refused."),
        Flag("page_size", "TOKENS", "Tokens in a page. Default: 16; 64 simulates up to twice as fast."),
        Flag("disable_radix_cache", "", "Keep no KV for later requests."),
    ),
    "tiers": (
        Flag("hicache_size", "GB", "Size of the host tier. Default: none."),
        Flag("hicache_write_policy", "POLICY", "When KV is copied down. Default: write_through."),
        Flag("disk_cache_size", "SIZE", "Size of the disk tier, such as 1TB. Default: none."),
        Flag(
            "prefetch_policy",
            "POLICY",
            "How long a request waits for pages from storage; --hicache-storage-prefetch-policy is the same. "
            "Default: adaptive.",
            ("--hicache-storage-prefetch-policy",),
        ),
        Flag("disk_read_gbps", "GB/S", "Read bandwidth, shared by all reads. Default: 7."),
        Flag("disk_write_gbps", "GB/S", "Write bandwidth. Default: 5."),
        Flag("disk_latency_us", "US", "Median latency of an operation, drawn log-normally. Default: 100."),
        Flag("disk_hang_rate", "SHARE", "Of reads and writes that take --disk-hang-s more. Default: 0."),
        Flag("disk_hang_s", "SECONDS", "Default: 1."),
        Flag("disk_error_rate", "SHARE", "Of reads that find a damaged page. Default: 0."),
    ),
    "scheduling": (
        Flag("max_running_requests", "N", "Requests that are computed together. Default: 256."),
        Flag("max_queued_requests", "N", "Requests that may wait; more are refused. Default: no bound."),
        Flag(
            "chunked_prefill_size",
            "TOKENS",
            "Prompt tokens of one step. Default: as many as keep it under 200 ms, at most 8192 (cpu: 2048).",
        ),
        Flag("schedule_policy", "POLICY", "Order in which waiting requests start. Default: least-work."),
        Flag("target_itl_ms", "MS", "Prompts are computed in chunks that keep a step under this. Default: 200 ms."),
        Flag("schedule_conservativeness", "FACTOR", "As of `headrace serve`. Default: 1."),
        Flag("disable_overlap_schedule", "", "Prepare a step only when the one before has ended."),
    ),
    "objectives": (
        Flag("slo_ttft_ms", "MS", "A request is good if its first token came within this … Default: 5000."),
        Flag("slo_itl_ms", "MS", "… and its tokens followed each other within this on average. Default: 100."),
    ),
}

_EXAMPLES: Final = """\
examples:
  headrace simulate --trace conversation_trace.jsonl --tp-size 2 --hicache-size 64 --disk-cache-size 1TB
  headrace simulate --trace conversation_trace.jsonl --limit 1000 --hicache-size 64 --disk-cache-size 1TB \\
      --compare prefetch-policy=best_effort,wait_complete,timeout,adaptive --json runs.json --plot runs.png
"""


def add_simulate_parser(commands: Any, formatter: type[argparse.HelpFormatter]) -> None:
    """The command's part of the command line. Values stay text: `scenario_from` reads and checks them."""
    parser = commands.add_parser(
        "simulate",
        help="replay a trace through the scheduler and the cache in virtual time",
        description="Replay a trace through the real scheduler and cache, in virtual time, on a device and a disk that "
        "only take time. Nothing is computed, so neither model nor GPU is needed (docs/simulation.md).",
        epilog=_EXAMPLES,
        usage="headrace simulate --trace FILE [FLAG [VALUE]]...",
        formatter_class=formatter,
    )
    add_flags(parser, MANUAL, _describe)
    output = parser.add_argument_group("output")
    output.add_argument(
        "--compare",
        metavar="FLAG=VALUE,…",
        action="append",
        default=[],
        help="One run for each value of a flag, side by side; again for another flag: all combinations.",
    )
    output.add_argument("--json", metavar="FILE", help="Also write flags and figures of all runs as JSON.")
    output.add_argument("--plot", metavar="FILE", help="Also draw the runs as a PNG (needs matplotlib).")
    output.add_argument(
        "--digest", action="store_true", help="Also print a hash of every step of each run: equal runs, equal hashes."
    )


def _describe(flag: Flag) -> str:
    rule = {"prefetch_policy": "hicache_storage_prefetch_policy"}.get(flag.field, flag.field)
    return f"{flag.help} One of {RULES[rule].allowed}." if flag.value == "POLICY" else flag.help


def simulate_command(flags: dict[str, Any], out: TextIO | None = None, errors: TextIO | None = None) -> int:
    """The table goes to `out`, progress to `errors`. Raises BadSetting."""
    from rich.console import Console

    from headrace.server.sim.replay import replay
    from headrace.server.sim.summary import check_plot, figures_table, plot
    from headrace.server.sim.workload import read_trace

    out, errors = out or sys.stdout, errors or sys.stderr
    # What the engine logs is about simulated events, by the hundred where a disk is too slow: the table counts them.
    logging.getLogger("headrace").addHandler(logging.NullHandler())
    compare, json_file, plot_file = flags.pop("compare"), flags.pop("json"), flags.pop("plot")
    digest = flags.pop("digest")
    scenarios = _scenarios(flags, compare)
    for path in (json_file, plot_file):
        if path is not None and not Path(path).absolute().parent.is_dir():
            raise BadSetting(f"{path} can't be written: {Path(path).absolute().parent} is no directory.")
        if path is not None and Path(path).is_dir():
            raise BadSetting(f"{path} can't be written: it is a directory. Give the path of a file.")
    if plot_file is not None:
        check_plot()
    runs: dict[str, Figures] = {}
    for name, scenario in scenarios.items():
        workload = read_trace(Path(scenario.trace), scenario.limit, scenario.speed, scenario.block_tokens)
        with Progress(errors) as progress:
            runs[name] = replay(scenario, workload, partial(progress, f"{name or 'simulated'}: requests ended"))
    first = next(iter(scenarios.values()))
    Console(file=out, width=None if out.isatty() else 200).print(figures_table(_title(first), runs, first))
    if digest:
        for name, figures in runs.items():
            print(f"digest {name} {figures.digest}".replace("  ", " "), file=out)
    if json_file is not None:
        rows = [{"flags": scenario, "figures": figures} for scenario, figures in zip(scenarios.values(), runs.values())]
        Path(json_file).write_bytes(msgspec.json.format(msgspec.json.encode(rows), indent=1))
    if plot_file is not None:
        plot(runs, Path(plot_file))
    return 0


def _scenarios(flags: Mapping[str, Any], compare: Sequence[str]) -> dict[str, Scenario]:
    """The runs by name: one, or one for each combination of the compared values."""
    from headrace.server.sim.scenario import SIM_RULES, scenario_from

    choices: list[list[tuple[str, str]]] = []
    for text in compare:
        name, equals, values = text.partition("=")
        name = name.removeprefix("--")
        field = name.replace("-", "_").removeprefix("hicache_storage_")
        if field not in SIM_RULES or not equals or not values or field == "trace":
            known = ", ".join(field.replace("_", "-") for field in SIM_RULES if field != "trace")
            raise BadSetting(f"--compare {text}: give FLAG=VALUE,VALUE…, with one of {known}.")
        choices.append([(field, value) for value in values.split(",")])
    combinations = list(itertools.product(*choices))
    if len(combinations) > MAX_RUNS:
        raise BadSetting(f"--compare: these are {len(combinations)} runs; at most {MAX_RUNS} are made at once.")
    return {
        ", ".join(value for _, value in chosen): scenario_from({**flags, **dict(chosen)}) for chosen in combinations
    }


def _title(scenario: Scenario) -> str:
    devices = f"{scenario.tp_size} x {scenario.device}" if scenario.calibration is None else scenario.calibration
    tiers = [f"device {scenario.num_pages * scenario.page_size} tokens"]
    if scenario.host_pages:
        tiers.append(f"host {scenario.host_pages * scenario.page_size}")
    if scenario.disk_pages:
        tiers.append(f"disk {scenario.disk_pages * scenario.page_size}")
    return f"{scenario.trace}: {scenario.model_shape} on {devices}; {', '.join(tiers)}; pages of {scenario.page_size}"
