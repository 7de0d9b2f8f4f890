"""How often each mode would pick the id that float32 picks: greedy, with the same ids before it (teacher-forced).

Two sets of positions: the golden prompts, whose reference is transformers' float32 output, and a text, whose reference
is this server's own float32.

    python scripts/bench/accuracy.py --text README.md docs/cache.md --json accuracy.json
"""

from __future__ import annotations

import argparse
import os
import sys
from pathlib import Path
from typing import Final

import msgspec
import numpy as np
import torch
from numpy.typing import NDArray

from headrace.ops.device import prepare_cpu
from headrace.ops.device_worker import DTYPES
from headrace.ops.kv_pool import KvPool
from headrace.ops.models.model import Model
from headrace.ops.models.registry import load_compiled, load_model
from headrace.ops.simd.compiler import Elements, prepare
from headrace.ops.step_kv import StepKv
from headrace.ops.streams import cpu_streams
from headrace.ops.wire import BatchRing, Counts, ForwardBatch, GroupShape, RingGeometry
from headrace.server.models import DEFAULT_MODEL, ModelProblem, cache_folder, resolve
from headrace.server.text import TextService

ROOT: Final = Path(__file__).parents[2]
GOLDEN: Final = ROOT / "tests/data/smollm2-135m-instruct-q4_1.json"
CHUNK_TOKENS: Final = 512
CONTEXT_TOKENS: Final = 2048
"""A longer text is cut into pieces of so many tokens."""
PAGE_TOKENS: Final = 16
REFERENCE: Final = "compiled-float32"
MODES: Final = ("torch-float32", "torch-bfloat16", "compiled-bfloat16", "compiled-q8")


class Case(msgspec.Struct):
    prompt_ids: list[int]
    greedy_ids: list[int]


class Golden(msgspec.Struct):
    cases: list[Case]


class Agreement(msgspec.Struct):
    mode: str
    positions: str
    agreed: int
    total: int


class Forced:
    """Runs sequences through a model, a chunk at a time."""

    def __init__(self, model: Model, dtype: torch.dtype) -> None:
        self._model, config = model, model.config
        group = GroupShape("full", 0, list(range(config.layers)), config.kv_heads, config.head_dim)
        pages = CONTEXT_TOKENS // PAGE_TOKENS
        self._pool = KvPool(group, pages, PAGE_TOKENS, 1, CONTEXT_TOKENS, dtype)
        self._pool.table[0] = np.arange(pages)
        geometry = RingGeometry(1, 1 << 16, 1, 0, config.vocab_size)
        self._ring = BatchRing(bytearray(geometry.size_bytes), geometry)

    def best(self, ids: list[int]) -> list[int]:
        """The greedy id after each of `ids`."""
        found: list[int] = []
        for start in range(0, len(ids), CHUNK_TOKENS):
            chunk = ids[start : start + CHUNK_TOKENS]
            batch = self._batch(start, len(chunk))
            places = {layer: (0, layer) for layer in range(self._model.config.layers)}
            positions = torch.from_numpy(batch.positions.astype(np.int64))
            kv = StepKv(batch, [self._pool], places, {}, cpu_streams().compute)
            hidden = self._model.forward(torch.tensor(chunk), positions, kv, torch.arange(len(chunk)))
            for rows in hidden.split(64):  # type: ignore[no-untyped-call]
                found += self._model.logits(rows).argmax(-1).tolist()
        return found

    def _batch(self, start: int, tokens: int) -> ForwardBatch:
        batch = self._ring.write(0, 0, Counts(tokens, 1, 0, *[0] * 7))
        batch.positions[:] = np.arange(start, start + tokens)
        batch.row_slot[:] = 0
        batch.row_start[:] = [0, tokens]
        batch.row_kv_len[:] = start + tokens
        return batch


def load(path: str, mode: str, threads: int, code: str) -> Model:
    kernels, _, kind = mode.partition("-")
    dtype: Elements = "float32" if kind == "float32" else "bfloat16"
    if kernels == "torch":
        return load_model(path, DTYPES[dtype], CONTEXT_TOKENS, lambda done, total: None)
    prepare("q8" if kind == "q8" else dtype, dtype, code, lambda done, total: None)
    return load_compiled(path, DTYPES[dtype], kind == "q8", CONTEXT_TOKENS, threads, lambda done, total: None)


def golden_agreement(forced: Forced, mode: str) -> Agreement:
    agreed = total = 0
    for case in msgspec.json.decode(GOLDEN.read_bytes(), type=Golden).cases:
        best = forced.best(case.prompt_ids + case.greedy_ids[:-1])[len(case.prompt_ids) - 1 :]
        agreed += int(np.equal(best, case.greedy_ids).sum())
        total += len(case.greedy_ids)
    return Agreement(mode, "golden", agreed, total)


def pieces(path: str, texts: list[Path]) -> list[list[int]]:
    text = TextService.open(Path(path), None)
    pieces = []
    for source in texts:
        ids = np.asarray(text.tokenizer.encode(source.read_text())).tolist()
        pieces += [ids[start : start + CONTEXT_TOKENS] for start in range(0, len(ids), CONTEXT_TOKENS)]
    return pieces


def text_best(forced: Forced, texts: list[list[int]]) -> NDArray[np.int64]:
    return np.concatenate([np.array(forced.best(ids), np.int64) for ids in texts])


def measure(path: str, modes: list[str], texts: list[list[int]], threads: int, code: str) -> list[Agreement]:
    reference: NDArray[np.int64] | None = None
    found = []
    for mode in [REFERENCE, *modes]:
        model = load(path, mode, threads, code)
        forced = Forced(model, DTYPES["float32" if mode.endswith("float32") else "bfloat16"])
        found.append(golden_agreement(forced, mode))
        best = text_best(forced, texts)
        if reference is None:
            reference = best
        found.append(Agreement(mode, "text", int((best == reference).sum()), len(best)))
        print(f"{mode} measured", file=sys.stderr)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default=DEFAULT_MODEL, help="a GGUF file or a model's name")
    parser.add_argument("--threads", type=int, default=len(os.sched_getaffinity(0)), help="all cores by default")
    parser.add_argument("--mode", choices=MODES, action="append", help="by default the two bfloat16 modes and q8")
    parser.add_argument("--text", type=Path, nargs="+", default=[ROOT / "docs/cache.md"], help="UTF-8 files")
    parser.add_argument("--json", type=Path, help="write the figures to this file too")
    arguments = parser.parse_args()
    cache = cache_folder(os.environ)
    try:
        model = str(resolve(arguments.model, cache))
    except ModelProblem as problem:
        sys.exit(str(problem))
    prepare_cpu(arguments.threads)
    modes = arguments.mode or ["torch-bfloat16", "compiled-bfloat16", "compiled-q8"]
    with torch.inference_mode():
        found = measure(model, modes, pieces(model, arguments.text), arguments.threads, str(cache / "kernels"))
    for one in found:
        share = one.agreed / one.total
        print(f"{one.mode:20}{one.positions:>8}{one.agreed:>7} of {one.total:<6}{share:>8.2%}")
    if arguments.json:
        arguments.json.write_bytes(msgspec.json.format(msgspec.json.encode(found)))


if __name__ == "__main__":
    main()
