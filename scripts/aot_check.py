#!/usr/bin/env python3
"""Compile every Triton kernel that a worker launches, for GPUs that need not be here, and say what each costs.

    scripts/aot_check.py                      # all variants, sm_80, sm_90 and sm_100: some minutes
    scripts/aot_check.py --short --arch 90    # one variant of each kernel
    scripts/aot_check.py --variant 'decode, 1 to 1024 rows' --arch 90

The launchers themselves are called, with tensors that have no memory, so that what is compiled is what would be
launched: tiles, warps, stages, alignment. Registers and stack come from the cubin, by the `cuobjdump` that triton
brings. A stack is memory that a thread spills to: the check fails where a kernel has one that may not, or where a
program wants more shared memory than the GPU has for one.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, NamedTuple

import msgspec
import torch
from rich.console import Console
from rich.table import Table

if TYPE_CHECKING:
    from torch import Tensor

SHARED_BYTES: Final = {80: 163 << 10, 90: 227 << 10, 100: 227 << 10}
"""That one program may have; an SM has 1 KiB more. CUDA programming guide, technical specifications."""
SM_REGISTERS: Final = 65536
SM_WARPS: Final = 64
BF16: Final = torch.bfloat16
F16: Final = torch.float16
F32: Final = torch.float32
I32: Final = torch.int32
VOCAB: Final = 128256
SLOTS: Final = 256
ROWS: Final = 64


class Variant(NamedTuple):
    """Calls of launchers that compile some kernels."""

    name: str
    compile: Callable[[], None]
    short: bool
    """Whether it stands for its kernels in the short check."""
    may_spill: str = ""
    """A kernel whose spills don't fail the check."""


class Compiled(msgspec.Struct):
    """One kernel of a variant, compiled."""

    variant: str
    kernel: str
    arch: int
    warps: int
    registers: int
    stack_bytes: int
    """Of a thread."""
    shared_bytes: int
    programs_per_sm: int
    """By registers, shared memory and warps."""
    seconds: float
    problem: str
    """Empty where all is well."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Returns the exit status: 1 where a kernel has a problem."""
    options = _parser().parse_args(arguments)
    # The interpreter's kernels can't be compiled, and triton looks when it is imported.
    os.environ.pop("TRITON_INTERPRET", None)
    os.environ.setdefault("TRITON_DEFAULT_FP_FUSION", "1")
    if options.part:
        return _compile_part(options)
    with tempfile.TemporaryDirectory() as cache:
        os.environ["TRITON_CACHE_DIR"] = cache
        # Fresh processes: what this one has imported must not matter.
        command = [sys.executable, __file__, *(["--short"] if options.short else [])]
        command += ["--variant", options.variant] if options.variant else []
        command += ["--arch", *map(str, options.arch)]
        parts = [
            subprocess.Popen([*command, "--part", str(part), str(options.jobs)], stdout=subprocess.PIPE)
            for part in range(options.jobs)
        ]
        outputs = [part.communicate()[0] for part in parts]
    if any(part.returncode for part in parts):
        raise SystemExit("a process that compiled kernels has failed: see above")
    found = [one for output in outputs for one in msgspec.json.decode(output, type=list[Compiled])]
    _print(found)
    if options.json:
        Path(options.json).write_text(json.dumps(msgspec.to_builtins(found), indent=1))
    problems = [one for one in found if one.problem]
    for one in problems:
        print(f"{one.kernel} of {one.variant} on sm_{one.arch}: {one.problem}", file=sys.stderr)
    return 1 if problems else 0


def _compile_part(options: argparse.Namespace) -> int:
    """Every so manieth of what is to be compiled, as JSON to standard output."""
    part, parts = options.part
    chosen = [
        variant.name
        for variant in variants()
        if (variant.name == options.variant if options.variant else variant.short or not options.short)
    ]
    if not chosen:
        raise SystemExit(f"there is no variant {options.variant!r}: {', '.join(each.name for each in variants())}")
    jobs = [(arch, name) for arch in options.arch for name in chosen]
    found = [one for job in jobs[part::parts] for one in _compile(*job)]
    sys.stdout.buffer.write(msgspec.json.encode(found))
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n")[0])
    parser.add_argument("--short", action="store_true", help="one variant of each kernel")
    parser.add_argument("--variant", metavar="NAME", help="this one alone")
    parser.add_argument("--arch", type=int, nargs="+", choices=sorted(SHARED_BYTES), default=sorted(SHARED_BYTES))
    parser.add_argument("--jobs", type=int, default=len(os.sched_getaffinity(0)), help="processes (default: cores)")
    parser.add_argument("--json", metavar="FILE", help="write the table there too")
    parser.add_argument("--part", type=int, nargs=2, help=argparse.SUPPRESS)
    return parser


def _print(found: Sequence[Compiled]) -> None:
    table = Table("kernel", "variant", "sm", "warps", "registers", "spills", "shared", "programs/SM", "seconds")
    for one in sorted(found, key=lambda one: (one.kernel, one.variant, one.arch)):
        numbers = (one.arch, one.warps, one.registers, one.stack_bytes, one.shared_bytes, one.programs_per_sm)
        style = "red" if one.problem else None
        table.add_row(one.kernel, one.variant, *map(str, numbers), f"{one.seconds:.1f}", style=style)
    Console(width=None if sys.stdout.isatty() else 140).print(table)


# ---------------------------------------------------------------------------------------------------------------
# What is compiled


def variants() -> list[Variant]:
    """All of them: shapes of models that are served, and the edges of each kernel."""
    return [
        Variant("8B bf16", _layer(4096, 14336, 32, 8, 128, BF16), True),
        Variant("8B fp32", _layer(4096, 14336, 32, 8, 128, F32), False),
        Variant("135M bf16", _layer(576, 1536, 9, 3, 64, BF16), False),
        Variant("70B bf16", _layer(8192, 28672, 64, 8, 128, BF16), False),
        Variant("128k ids", _sampling, True),
        Variant("decode, 1 to 1024 rows", _decodes, False),
        *_attention_variants(),
    ]


def _attention_variants() -> Iterator[Variant]:
    for head_dim in (64, 80, 96, 128, 256):
        for group in (1, 4, 8):
            main_one = (head_dim, group) == (128, 4)
            yield _attention(head_dim, group, 16, BF16, short=main_one)
        yield _attention(head_dim, 4, 16, F32)
    yield _attention(128, 7, 16, BF16)
    yield _attention(128, 4, 16, F16)
    yield _attention(128, 4, 64, BF16)
    yield _attention(128, 4, 24, BF16)
    yield _attention(128, 4, 16, BF16, window=4096)
    yield _attention(256, 2, 16, BF16, window=4096, soft_cap=50.0)


def _attention(
    head_dim: int,
    group: int,
    page_tokens: int,
    dtype: torch.dtype,
    *,
    window: int = 0,
    soft_cap: float = 0.0,
    short: bool = False,
) -> Variant:
    """Decode and extend."""
    kv_heads = 8
    heads = kv_heads * group

    def compile_both() -> None:
        from headrace.ops.triton.decode_attention import attend_decode
        from headrace.ops.triton.extend_attention import attend_extend, tile_tokens
        from headrace.ops.triton.spans import max_spans

        q = _meta(ROWS, heads + 2 * kv_heads, head_dim, dtype=dtype)[:, :heads]
        layer = _meta(4096, 2, kv_heads, page_tokens, head_dim, dtype=dtype)
        table, rows, out = (
            _meta(SLOTS, 8192, dtype=I32),
            _meta(ROWS, dtype=I32),
            _meta(ROWS, heads, head_dim, dtype=dtype),
        )
        spans = max_spans(131072, window=window)
        options: dict[str, Any] = {"scale": head_dim**-0.5, "window": window, "soft_cap": soft_cap}
        parts = _meta(ROWS, spans, heads, head_dim, dtype=F32)
        attend_decode(q, layer, table, rows, rows, out, parts, parts[..., 0], **options)
        tile = tile_tokens(heads, kv_heads, head_dim, dtype)
        parts = _meta(8, heads, tile, head_dim, dtype=F32)
        pieces, merges = _meta(64, 5, dtype=I32), _meta(8, 4, dtype=I32)
        attend_extend(q, layer, table, rows, rows, rows, out, pieces, merges, parts, parts[..., 0], **options)

    name = f"{head_dim}×{group}, pages of {page_tokens}, {_short_name(dtype)}"
    name += f", window {window}" * bool(window) + f", cap {soft_cap:g}" * bool(soft_cap)
    # The least tile of heads of 256 in float32 spills: its queries, in the two parts of a product of three, are all the
    # registers that a thread has. It is for comparing with a reference, not for serving.
    return Variant(name, compile_both, short, "_attend_spans" if (head_dim, dtype) == (256, F32) else "")


def _decodes() -> None:
    """What graphs and mixed batches launch on one server: few kernels for all numbers of rows."""
    from headrace.ops.triton.decode_attention import attend_decode
    from headrace.ops.triton.spans import max_spans

    layer, table = _meta(4096, 2, 8, 16, 128, dtype=BF16), _meta(1024, 8192, dtype=I32)
    parts = _meta(1024, max_spans(131072), 32, 128, dtype=F32)
    for rows in (1, 2, 15, 16, 17, 64, 100, 255, 256, 257, 1024):
        q, slots = _meta(rows, 48, 128, dtype=BF16)[:, :32], _meta(rows, dtype=I32)
        out = _meta(rows, 32, 128, dtype=BF16)
        attend_decode(q, layer, table, slots, slots, out, parts[:rows], parts[:rows, ..., 0], scale=0.1)


def _layer(
    hidden: int, intermediate: int, heads: int, kv_heads: int, head_dim: int, dtype: torch.dtype
) -> Callable[[], None]:
    """What a layer has beside attention and products, and the copies of its pages."""

    def compile_all() -> None:
        from headrace.ops.triton.activation import gated
        from headrace.ops.triton.embedding import embed
        from headrace.ops.triton.kv_copy import back_up, load_layer
        from headrace.ops.triton.kv_write import write_kv
        from headrace.ops.triton.norm import norm_heads_, rms_norm
        from headrace.ops.triton.rotary import rotate_

        residual, weight = _meta(ROWS, hidden, dtype=F32), _meta(hidden, dtype=F32)
        branch = _meta(ROWS, hidden, dtype=dtype)
        rms_norm(residual, weight, branch, 1e-5)
        rms_norm(residual, weight, branch, 1e-5, branch)
        for kind in ("silu", "gelu"):
            gated(_meta(ROWS, 2 * intermediate, dtype=dtype), _meta(ROWS, intermediate, dtype=dtype), kind)
        qkv = _meta(ROWS, heads + 2 * kv_heads, head_dim, dtype=dtype)
        rows, pages = _meta(ROWS, dtype=I32), _meta(16, dtype=I32)
        norm_heads_(qkv[:, : heads + kv_heads], _meta(heads + kv_heads, head_dim, dtype=F32), 1e-6)
        turns = _meta(8192, head_dim // 2, 2, dtype=F32)
        rotate_(qkv[:, : heads + kv_heads], rows, turns, "interleaved")
        rotate_(qkv[:, : heads + kv_heads], rows, turns, "halves")
        embed(rows, _meta(SLOTS, dtype=torch.int64), _meta(VOCAB, hidden, dtype=dtype), residual)
        pool = _meta(32, 4096, 2, kv_heads, 16, head_dim, dtype=dtype)
        write_kv(qkv[:, heads:], pool[0], _meta(SLOTS, 8192, dtype=I32), rows, rows)
        host = _meta(4096, 32 * pool[0, 0].numel(), dtype=dtype)
        load_layer(host, pool[0], 3, pages, pages)
        back_up(pool, host, pages, pages)

    return compile_all


def _sampling() -> None:
    from headrace.ops.triton.argmax import best, blocks
    from headrace.ops.triton.draw import draw
    from headrace.ops.triton.logprobs import report_logprobs
    from headrace.ops.triton.penalties import adjust
    from headrace.ops.triton.slot_tables import begin_slots, make_tables
    from headrace.ops.wire import INIT_FLOATS, INIT_INTS

    tables = make_tables(SLOTS, VOCAB, torch.device("meta"))
    inits, numbers = _meta(4, dtype=I32), (_meta(4, len(INIT_INTS), dtype=I32), _meta(4, len(INIT_FLOATS), dtype=F32))
    begin_slots(tables, inits, *numbers, _meta(99, dtype=I32), _meta(9, dtype=F32), _meta(4, 2, dtype=I32), 99)
    logits, rows, values = _meta(ROWS, VOCAB, dtype=F32), _meta(ROWS, dtype=I32), _meta(ROWS, dtype=F32)
    block_values, block_ids = _meta(ROWS, blocks(VOCAB), dtype=F32), _meta(ROWS, blocks(VOCAB), dtype=I32)
    mask_bits = _meta(8, -(-VOCAB // 32), dtype=I32)
    adjust(logits, tables, rows, rows, rows, mask_bits, logits, block_values)
    adjust(logits, tables, rows, rows, rows, mask_bits, _meta(ROWS, VOCAB, dtype=F32), block_values)
    best(logits, values, rows, block_values, block_ids)
    draw(logits, tables, values, rows, rows, rows, rows, _meta(SLOTS, dtype=torch.int64), rows, rows)
    report_logprobs(logits, rows, rows, values, _meta(ROWS, 20, dtype=I32), _meta(ROWS, 20, dtype=F32))


def _meta(*shape: int, dtype: torch.dtype) -> Tensor:
    return torch.empty(shape, dtype=dtype, device="meta")


def _short_name(dtype: torch.dtype) -> str:
    return {BF16: "bf16", F16: "fp16", F32: "fp32"}[dtype]


# ---------------------------------------------------------------------------------------------------------------
# In a process of its own


class _AbsentGpu:
    """What triton asks its driver when it compiles but doesn't launch."""

    def __init__(self, arch: int) -> None:
        from triton.backends.compiler import GPUTarget

        self._target = GPUTarget("cuda", arch, 32)

    def get_current_target(self) -> Any:
        return self._target

    def get_current_device(self) -> int:
        # Triton keeps what it compiled by device.
        return int(self._target.arch)

    def get_current_stream(self, device: int) -> int:
        return 0


def _compile(arch: int, name: str) -> list[Compiled]:
    """Every kernel that the variant launches, once for each way in which it is compiled."""
    import triton
    from triton.runtime.jit import JITFunction

    triton.runtime.driver.set_active(_AbsentGpu(arch))
    variant = next(variant for variant in variants() if variant.name == name)
    found: dict[str, Compiled] = {}
    launch = JITFunction.run

    def compile_only(kernel: Any, *arguments: Any, grid: Any, warmup: bool, **options: Any) -> None:
        began = time.perf_counter()
        compiled = launch(kernel, *arguments, grid=grid, warmup=True, **options)
        if compiled.hash not in found:
            cubin, seconds = compiled.asm["cubin"], time.perf_counter() - began
            found[compiled.hash] = _described(variant, kernel.__name__, arch, compiled.metadata, cubin, seconds)

    JITFunction.run = compile_only
    try:
        variant.compile()
    finally:
        JITFunction.run = launch
    return list(found.values())


def _described(variant: Variant, kernel: str, arch: int, metadata: Any, cubin: bytes, seconds: float) -> Compiled:
    usage = _resource_usage(cubin)
    registers, stack = usage["REG"], usage["STACK"] + usage["LOCAL"]
    shared, warps = int(metadata.shared), int(metadata.num_warps)
    by_registers = SM_REGISTERS // (-(-registers // 8) * 8 * 32 * warps)
    by_shared = (SHARED_BYTES[arch] + 1024) // (shared + 1024)
    problem = ""
    if stack and kernel != variant.may_spill:
        problem = f"spills {stack} bytes of a thread: take smaller tiles or more warps"
    if shared > SHARED_BYTES[arch]:
        problem = f"wants {shared} bytes of shared memory, of {SHARED_BYTES[arch]}: take fewer stages or smaller tiles"
    programs = min(by_registers, by_shared, SM_WARPS // warps, 32)
    return Compiled(variant.name, kernel, arch, warps, registers, stack, shared, programs, round(seconds, 2), problem)


def _resource_usage(cubin: bytes) -> dict[str, int]:
    from triton import knobs

    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        said = subprocess.run(
            [knobs.nvidia.cuobjdump.path, "-res-usage", file.name], capture_output=True, text=True, check=True
        )
    usage = {key: int(value) for key, value in re.findall(r"\b(REG|STACK|LOCAL):(\d+)", said.stdout)}
    if set(usage) != {"REG", "STACK", "LOCAL"}:
        raise RuntimeError(f"cuobjdump did not say what a kernel uses, but: {said.stdout}{said.stderr}")
    return usage


if __name__ == "__main__":
    sys.exit(main())
