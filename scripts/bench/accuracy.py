#!/usr/bin/env python3
"""How often each mode would pick the id that a float32 reference picks: greedy, with the same ids before it.

    scripts/bench/accuracy.py [--text README.md docs/cache.md] [--json FILE]

The reference is transformers in float32, from the file's dequantized weights. There are two sets of positions: the
golden prompts with their greedy outputs, and a text of 2,000 tokens or more. llama.cpp's Q8_0 (made from the same
weights) is measured on the same ids. Both run in environments below $HEADRACE_CACHE/peers, which this makes once, as
`scripts/bench/peers.py` does. The bars: bfloat16 98 %, q8 97.5 % and not below llama.cpp.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
from pathlib import Path
from typing import Final, Protocol

import msgspec
import numpy as np
import torch
from numpy.typing import NDArray

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from bench.sides.environments import Environment, Unavailable, llama_cpp
from bench.sides.servers import models

from headrace.ops.backend import DTYPES
from headrace.ops.device import prepare_cpu
from headrace.ops.kv_pool import KvPool
from headrace.ops.models.model import Model
from headrace.ops.models.registry import load_compiled, load_model
from headrace.ops.simd.compiler import Elements, prepare
from headrace.ops.step_kv import StepKv
from headrace.ops.streams import in_order_streams
from headrace.ops.wire import BatchRing, Counts, ForwardBatch, GroupShape, RingGeometry
from headrace.server.models import DEFAULT_MODEL, ModelProblem, cache_folder, resolve
from headrace.server.text import TextService

ROOT: Final = Path(__file__).resolve().parents[2]
SCRIPTS: Final = ROOT / "scripts"
GOLDEN: Final = ROOT / "tests/data/smollm2-135m-instruct-q4_1.json"
CHUNK_TOKENS: Final = 512
CONTEXT_TOKENS: Final = 2048
"""A longer text is cut into pieces of so many tokens."""
PAGE_TOKENS: Final = 16
PEER_S: Final = 1200.0
REFERENCE: Final = "transformers-float32"
LLAMA: Final = "llama.cpp-q8_0"
MODES: Final = ("torch-float32", "compiled-float32", "torch-bfloat16", "compiled-bfloat16", "compiled-q8", LLAMA)
DEFAULT_MODES: Final = ("compiled-bfloat16", "compiled-q8", LLAMA)
BARS: Final = {"bfloat16": 0.98, "q8": 0.975}


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

    @property
    def share(self) -> float:
        return self.agreed / self.total


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
            kv = StepKv(batch, [self._pool], places, {}, in_order_streams().compute)
            hidden = self._model.forward(np.array(chunk), kv, np.arange(len(chunk)))
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


class Picker(Protocol):
    """One mode at work."""

    def __call__(self, sequences: list[list[int]]) -> list[list[int]]:
        """The best id after each id."""


def own_picker(path: str, mode: str, threads: int, code: str) -> Picker:
    model = load(path, mode, threads, code)
    forced = Forced(model, DTYPES["float32" if mode.endswith("float32") else "bfloat16"])
    return lambda sequences: [forced.best(ids) for ids in sequences]


def peer_picker(path: Path, mode: str, threads: int, cache: Path) -> Picker:
    """Raises Unavailable."""
    settings: dict[str, str | os.PathLike[str]] = {"PYTHONPATH": str(SCRIPTS), "TQDM_DISABLE": "1"}
    if mode == LLAMA:
        made = llama_cpp(cache)
        python, file = made.python, models(path, cache).q8_0
        settings |= {"PYTHONPATH": f"{SCRIPTS}:{made.bindings}", "LLAMA_CPP_LIB_PATH": made.programs}
        settings |= {"LD_LIBRARY_PATH": made.programs}
    else:
        python, file = Environment("transformers", cache).prepare(), path
    command = [str(python), "-P", "-m", "bench.sides.forced", mode.split("-")[0], str(file), str(threads)]

    def pick(sequences: list[list[int]]) -> list[list[int]]:
        said = subprocess.run(
            command,
            input=msgspec.json.encode(sequences) + b"\n",
            stdout=subprocess.PIPE,
            env={**os.environ, **settings},
            check=True,
            timeout=PEER_S,
        )
        return msgspec.json.decode(said.stdout, type=list[list[int]])

    return pick


def pieces(path: str, texts: list[Path]) -> list[list[int]]:
    text = TextService.open(Path(path), None)
    pieces = []
    for source in texts:
        ids = np.asarray(text.tokenizer.encode(source.read_text())).tolist()
        pieces += [ids[start : start + CONTEXT_TOKENS] for start in range(0, len(ids), CONTEXT_TOKENS)]
    return pieces


def measure(pickers: dict[str, Picker], texts: list[list[int]]) -> list[Agreement]:
    """The reference comes first. Raises SystemExit where it does not agree with the golden ids itself."""
    cases = msgspec.json.decode(GOLDEN.read_bytes(), type=Golden).cases
    sequences = [case.prompt_ids + case.greedy_ids[:-1] for case in cases] + texts
    golden = np.concatenate([case.greedy_ids for case in cases])
    reference: NDArray[np.int64] | None = None
    found = []
    for mode, pick in pickers.items():
        best = pick(sequences)
        outputs = np.concatenate([ids[len(case.prompt_ids) - 1 :] for ids, case in zip(best, cases)])
        text = np.concatenate(best[len(cases) :])
        if reference is None:
            if not np.array_equal(outputs, golden):
                sys.exit(f"{mode} does not give the golden ids: {GOLDEN} and this model are not of one file")
            reference = text
        found.append(Agreement(mode, "golden", int((outputs == golden).sum()), len(golden)))
        found.append(Agreement(mode, "text", int((text == reference).sum()), len(text)))
        print(f"{mode} measured", file=sys.stderr)
    return found


def verdict(one: Agreement, all_of_them: list[Agreement]) -> str:
    """Whether the bar of this mode is met, and what it is."""
    bar = BARS.get(one.mode.rpartition("-")[2])
    if bar is None:
        return ""
    llama = [other.share for other in all_of_them if (other.mode, other.positions) == (LLAMA, one.positions)]
    needed = max([bar, *llama]) if one.mode.endswith("q8") else bar
    return f"{'met' if one.share >= needed else 'NOT MET'}: {needed:.2%}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default=DEFAULT_MODEL, help="a GGUF file or a model's name")
    parser.add_argument("--threads", type=int, default=len(os.sched_getaffinity(0)), help="all cores by default")
    parser.add_argument("--mode", choices=MODES, action="append", help=f"by default {', '.join(DEFAULT_MODES)}")
    parser.add_argument("--text", type=Path, nargs="+", default=[ROOT / "docs/cache.md"], help="UTF-8 files")
    parser.add_argument("--json", type=Path, help="write the figures to this file too")
    arguments = parser.parse_args()
    cache = cache_folder(os.environ)
    try:
        model = str(resolve(arguments.model, cache))
    except ModelProblem as problem:
        sys.exit(str(problem))
    prepare_cpu(arguments.threads)
    pickers: dict[str, Picker] = {}
    for mode in [REFERENCE, *(arguments.mode or DEFAULT_MODES)]:
        if mode in (REFERENCE, LLAMA):
            try:
                pickers[mode] = peer_picker(Path(model), mode, arguments.threads, cache)
            except Unavailable as problem:
                if mode == REFERENCE:
                    sys.exit(f"there is no reference: {problem}")
                print(f"{mode} is left out: {problem}", file=sys.stderr)
        else:
            pickers[mode] = own_picker(model, mode, arguments.threads, str(cache / "kernels"))
    with torch.inference_mode():
        found = measure(pickers, pieces(model, arguments.text))
    for one in found:
        met = verdict(one, found)
        print(f"{one.mode:22}{one.positions:>8}{one.agreed:>7} of {one.total:<6}{one.share:>8.2%}  {met}")
    if arguments.json:
        arguments.json.write_bytes(msgspec.json.format(msgspec.json.encode(found)))


if __name__ == "__main__":
    main()
