"""The flags of `headrace serve`: the manual that --help prints, and what to say to flags of other servers.

A flag sets the field of `Settings` that has its name. Names and meanings are SGLang's where SGLang has the thing.
"""

from __future__ import annotations

import argparse
import difflib
import re
import shutil
import textwrap
from collections.abc import Mapping, Sequence
from typing import Any, Final, NoReturn

import msgspec

from headrace.server.config import RULES, BadSetting, Settings, flag_of
from headrace.server.manual import Flag, FlagTable, add_flags
from headrace.server.models import DEFAULT_MODEL

MANUAL: Final[FlagTable] = {
    "model": (
        Flag(
            "model_path",
            "MODEL",
            "A known model's name, fetched if need be; the path of a GGUF file or a folder; or ORG/NAME[@REVISION] of "
            "the Hugging Face Hub, fetched into its own cache (needs the extra hub).",
            ("--model",),
        ),
        Flag("served_model_name", "NAME", "What the API calls the model, beside `default`. Default: its own name."),
        Flag("chat_template", "FILE", "A Jinja chat template. Default: the model's own."),
        Flag(
            "sampling_defaults",
            "WHICH",
            "What requests get that leave out temperature, top_p, top_k, min_p or repetition_penalty: model is what "
            "its makers wrote into generation_config.json; openai is 1, and everything else off.",
        ),
        Flag("context_length", "TOKENS", "Longest prompt plus output. Default: the model's, or what memory holds."),
    ),
    "address and keys": (
        Flag("host", "ADDRESS", "Address to listen on; 0.0.0.0 is every interface of the machine."),
        Flag("port", "PORT", "Port to listen on; 0 takes any free one."),
        Flag("api_key", "KEY", "Key that requests must bear; safer in HEADRACE_API_KEY. Default: none is needed."),
        Flag(
            "admin_api_key",
            "KEY",
            "Key for what changes the server (flushing, aborting all); also HEADRACE_ADMIN_API_KEY. "
            "Default: --api-key opens these too.",
        ),
    ),
    "device and precision": (
        Flag(
            "device",
            "DEVICE",
            "What the model runs on; auto is cuda where there is a card that can be used and no flag is given that "
            "only a CPU has. No GPU has been tried yet: see docs/gpu.md.",
        ),
        Flag(
            "dtype",
            "DTYPE",
            "Of weights, activations and KV; auto is bfloat16 on a GPU, and where the CPU has it in hardware.",
        ),
        Flag(
            "quantization",
            "METHOD",
            "How weights are kept: none is in --dtype; q8 in 8 bits, or in the file's own 4, in groups of 32, which "
            "reads fewer bytes and is as accurate. Activations stay bfloat16, KV in --dtype.",
        ),
        Flag(
            "cpu_kernels",
            "WHICH",
            "Who computes on a CPU: compiled is numba code made for this CPU, whose results for a request depend on "
            "its own tokens alone, bit for bit; torch runs any shape. auto is compiled where that can be.",
        ),
        Flag(
            "cpu_threads",
            "THREADS",
            "Threads of the model on a CPU. Default: one less than the cores, which leaves one to the server. With "
            "as many as there are cores each stays on its own.",
        ),
    ),
    "memory": (
        Flag(
            "mem_fraction_static",
            "FRACTION",
            "Share of the free memory that weights and KV cache take together. "
            "Default: what the weights take, and a cache of 1 GiB or of one context; less where memory is short.",
        ),
        Flag("max_total_tokens", "TOKENS", "Size of the KV cache. Default: from --mem-fraction-static."),
        Flag("page_size", "TOKENS", "Tokens in a page, the unit in which KV is kept and reused."),
        Flag("disable_radix_cache", "", "Keep no KV for later requests with the same beginning."),
    ),
    "tiers of the KV cache": (
        Flag("enable_hierarchical_cache", "", "Keep KV that the device lets go of in host memory."),
        Flag(
            "hicache_ratio",
            "FACTOR",
            "Size of the host tier as a multiple of the device's. Default: 2, less where memory is short.",
        ),
        Flag("hicache_size", "GB", "Size of the host tier; counts before --hicache-ratio. Default: from the ratio."),
        Flag(
            "hicache_write_policy",
            "POLICY",
            "When KV is copied down: at once, when it is used again, or when the device evicts it.",
        ),
        Flag(
            "hicache_storage_backend",
            "BACKEND",
            "What stands behind the host tier. Default: disk if it has a directory, else none.",
        ),
        Flag("hicache_storage_prefetch_policy", "POLICY", "How long a request waits for pages from storage."),
        Flag(
            "hicache_storage_backend_extra_config",
            "JSON",
            "A JSON object, or @FILE: thresholds, time-outs, threads (docs/cache.md). Default: none.",
        ),
        Flag(
            "disk_cache_dir",
            "DIR",
            "Keep KV on disk in this directory, across restarts; prompts can be reconstructed from it. "
            "Default: no disk tier.",
        ),
        Flag("disk_cache_size", "SIZE", "Hard bound of the disk tier, such as 20GB. Default: 20GB."),
        Flag(
            "page_hash", "POLICY", "How pages are named; sha256 for a store that tenants share who distrust each other."
        ),
        Flag("disk_cache_fsync", "", "Acknowledge a page only when it would survive a power cut: slower."),
    ),
    "scheduling": (
        Flag("max_running_requests", "REQUESTS", "Requests that are computed together."),
        Flag("max_queued_requests", "REQUESTS", "Requests that may wait; more are answered 503."),
        Flag(
            "max_queued_tokens",
            "TOKENS",
            "Prompt tokens that may wait; more are answered 503, but for one request alone. "
            "Default: 262144, or one context if that is longer.",
        ),
        Flag(
            "chunked_prefill_size",
            "TOKENS",
            "Prompt tokens computed in one step; -1 takes whole prompts. "
            "Default: measured at start, so that a step takes under 200 ms.",
        ),
        Flag(
            "target_itl_ms",
            "MS",
            "Longest gap between two tokens of a stream that the prompts of others should cause; their chunks are cut "
            "to fit. Default: 200, or as --chunked-prefill-size gives.",
        ),
        Flag("schedule_policy", "POLICY", "Order in which waiting requests start (docs/scheduling.md)."),
        Flag(
            "enable_priority_scheduling",
            "",
            "Let requests with a higher `priority` start first; else the field is ignored.",
        ),
        Flag("schedule_low_priority_values_first", "", "Lower values of `priority` start first instead."),
        Flag(
            "priority_scheduling_preemption_threshold",
            "DIFFERENCE",
            "A request takes the place of a running one whose priority is lower by more than this.",
        ),
        Flag("disable_priority_preemption", "", "Priorities order the queue, and running requests stay."),
        Flag("abort_on_priority_when_disabled", "", "Refuse `priority` instead, without --enable-priority-scheduling."),
        Flag(
            "schedule_conservativeness",
            "FACTOR",
            "Scales the outputs that running requests are expected to add before a new one starts: "
            "more preempts less, less runs more at once.",
        ),
        Flag("disable_overlap_schedule", "", "Prepare a step only when the one before has ended: slower, same output."),
        Flag("request_timeout_s", "SECONDS", "End a request this long after it came (504); 0 never does."),
        Flag("queue_timeout_s", "SECONDS", "End a request that has not begun by then (503); 0 never does."),
    ),
    "start, logs, end": (
        Flag("skip_server_warmup", "", "Be ready sooner, with a slow first request and a guessed prefill chunk."),
        Flag("watchdog_timeout", "SECONDS", "Restart the device worker when one step takes longer than this."),
        Flag(
            "record_steps",
            "FILE",
            "Write what each step held and took, for `headrace simulate --calibration FILE`. Default: nowhere.",
        ),
        Flag("log_level", "LEVEL", "Least serious messages to print."),
        Flag(
            "drain_timeout_s",
            "SECONDS",
            "After Ctrl-C or SIGTERM: time for running requests to end, and for cached pages to be written.",
        ),
    ),
}

_EXAMPLES: Final = f"""\
examples:
  headrace serve             # {DEFAULT_MODEL} on 127.0.0.1:30000
  headrace serve --model-path ./model.gguf --port 8080 --context-length 4096

environment:
  HEADRACE_CACHE             folder of fetched models (default: headrace in XDG_CACHE_HOME or ~/.cache)
  HF_TOKEN, HF_HOME, HF_ENDPOINT, HF_HUB_OFFLINE
                             as everywhere, for models of the Hugging Face Hub
  HEADRACE_API_KEY           as --api-key, hidden from other users of the machine
  HEADRACE_ADMIN_API_KEY     as --admin-api-key
"""


def serve_parser(parser: argparse.ArgumentParser) -> None:
    """Give a parser the flags of `headrace serve`. Values stay text: `settings_from` reads and checks them."""
    parser.formatter_class = Manual
    parser.usage = "headrace serve [FLAG [VALUE]]..."
    parser.epilog = _EXAMPLES
    defaults = {field.name: field.default for field in msgspec.structs.fields(Settings)}
    add_flags(parser, MANUAL, lambda flag: _describe(flag, defaults[flag.field]))


def _describe(flag: Flag, default: object) -> str:
    if not flag.value:
        return flag.help
    parts = [flag.help]
    if flag.value in ("DEVICE", "DTYPE", "LEVEL", "POLICY", "BACKEND"):
        parts.append(f"One of {RULES[flag.field].allowed}.")
    if default is not None:
        parts.append(f"Default: {default:g}." if isinstance(default, float) else f"Default: {default}.")
    return " ".join(parts)


class Manual(argparse.RawDescriptionHelpFormatter):
    """--help with room: flags in a column of their own, examples as they are written."""

    def __init__(self, prog: str) -> None:
        width = min(shutil.get_terminal_size().columns, 110)
        super().__init__(prog, max_help_position=36, width=width)

    def _split_lines(self, text: str, width: int) -> list[str]:
        """A flag is never broken at its hyphens: it could not be found or copied."""
        return textwrap.wrap(text, width, break_on_hyphens=False)


_IGNORED_VALUE: Final = re.compile(r"ignored explicit argument '(.*)'", re.DOTALL)
"""argparse's words."""


class Parser(argparse.ArgumentParser):
    """An argument parser whose errors are one sentence, without the list of all flags before it."""

    def __init__(self, **options: Any) -> None:
        super().__init__(allow_abbrev=False, **options)

    def error(self, message: str) -> NoReturn:
        """Raises BadSetting."""
        message = message.removeprefix("argument ")
        name, _, reason = message.partition(": ")
        flag = name.partition("/")[0]
        if reason == "expected one argument" and (rule := RULES.get(flag.removeprefix("--").replace("-", "_"))):
            raise BadSetting(f"{flag} needs a value: give {rule.allowed}.")
        if value := _IGNORED_VALUE.fullmatch(reason):
            raise BadSetting(f"{flag} is a switch and takes no value: leave `={value[1]}` out.")
        raise BadSetting(message)


def refuse_unknown(extras: Sequence[str]) -> None:
    """Raise BadSetting for what the parser did not know, naming the flag that was meant, where that can be told."""
    if not extras:
        return
    name = next((word for word in extras if word.startswith("-")), None)
    if name is None:
        raise BadSetting(
            f"What is {extras[0]!r}? A model is given as --model-path {extras[0]}; other values need a flag."
        )
    name = name.partition("=")[0]
    if (answer := FOREIGN.get(name)) is not None:
        raise BadSetting(f"{name} is not a flag here: {answer}")
    ours = [flag_of(field) for field in RULES]
    near = difflib.get_close_matches(name, ours, n=1, cutoff=0.75)
    meant = f"Did you mean {near[0]}?" if near else "`headrace serve --help` lists all."
    raise BadSetting(f"{name} is not a flag of headrace. {meant}")


_CHUNK: Final = "use --chunked-prefill-size TOKENS."
_CONTEXT: Final = "use --context-length TOKENS."
_FRACTION: Final = "use --mem-fraction-static FRACTION, or --max-total-tokens TOKENS."
_ONE_DEVICE: Final = "the model runs on one device for now."
_RUNNING: Final = "use --max-running-requests REQUESTS."
_OF_THE_FILE: Final = "tokenizer, template and shape are read from the model file."

FOREIGN: Final[Mapping[str, str]] = {
    # vLLM
    "--max-model-len": _CONTEXT,
    "--max-num-seqs": _RUNNING,
    "--max-num-queued-reqs": "use --max-queued-requests REQUESTS.",
    "--max-num-queued-tokens": "use --max-queued-tokens TOKENS.",
    "--max-num-batched-tokens": _CHUNK,
    "--enable-chunked-prefill": "prompts are always computed in chunks; --chunked-prefill-size sets their length.",
    "--block-size": "use --page-size TOKENS.",
    "--gpu-memory-utilization": _FRACTION,
    "--kv-cache-memory-bytes": "use --max-total-tokens TOKENS; the table at start says how many bytes they are.",
    "--tensor-parallel-size": _ONE_DEVICE,
    "--pipeline-parallel-size": _ONE_DEVICE,
    "-tp": _ONE_DEVICE,
    "--scheduling-policy": "use --schedule-policy POLICY.",
    "--async-scheduling": "steps overlap already; --disable-overlap-schedule turns that off.",
    "--no-async-scheduling": "use --disable-overlap-schedule.",
    "--enable-prefix-caching": "prefixes are reused already; --disable-radix-cache turns that off.",
    "--no-enable-prefix-caching": "use --disable-radix-cache.",
    "--kv-offloading-size": "use --hicache-size GB.",
    "--uvicorn-log-level": "use --log-level LEVEL.",
    "--tokenizer": _OF_THE_FILE,
    "--generation-config": "use --sampling-defaults model, which is the default, or openai.",
    "--trust-remote-code": "code from a model's folder is never run; leave the flag out.",
    # SGLang
    "--tp-size": _ONE_DEVICE,
    "--tp": _ONE_DEVICE,
    "--dp-size": _ONE_DEVICE,
    "--tokenizer-path": _OF_THE_FILE,
    "--enable-metrics": "/metrics is always there; leave the flag out.",
    "--enable-cache-report": "cached tokens are always reported; leave the flag out.",
    "--allow-auto-truncate": "a prompt that is too long is refused with both lengths, nothing is cut unseen.",
    "--skip-warmup": "use --skip-server-warmup.",
    "--default-priority-value": "a request without `priority` has 0.",
    "--random-seed": "a seed belongs to a request: `seed` in its body.",
    # llama-server
    "-m": "use --model-path MODEL.",
    "-hf": "use --model-path ORG/NAME for a model with safetensors, the path of a file for a GGUF.",
    "--revision": "use --model-path ORG/NAME@REVISION.",
    "-a": "use --served-model-name NAME.",
    "--alias": "use --served-model-name NAME.",
    "-c": _CONTEXT,
    "--ctx-size": _CONTEXT,
    "-np": _RUNNING,
    "--parallel": _RUNNING,
    "-b": _CHUNK,
    "--batch-size": _CHUNK,
    "-ub": _CHUNK,
    "--ubatch-size": _CHUNK,
    "-t": "use --cpu-threads THREADS.",
    "--threads": "use --cpu-threads THREADS.",
    "-ngl": _ONE_DEVICE,
    "--n-gpu-layers": _ONE_DEVICE,
    "-sm": _ONE_DEVICE,
    "--split-mode": _ONE_DEVICE,
    "--fit": "memory is always fitted before loading; --mem-fraction-static sets the share.",
    "--cache-ram": "use --hicache-size GB.",
    "--api-key-file": "put the key into the environment as HEADRACE_API_KEY.",
    "--chat-template-file": "use --chat-template FILE.",
    "--jinja": "chat templates are always Jinja; leave the flag out.",
    "--context-shift": "a context that is full ends the request with finish_reason `length`.",
    "-to": "use --request-timeout-s SECONDS.",
    "--timeout": "use --request-timeout-s SECONDS.",
}
"""What users of vLLM, SGLang and llama-server will type, and what to use here."""
