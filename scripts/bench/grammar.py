"""What a grammar library costs: import, compiling three schemas, a mask a token; and the way to the worker and back.

    python scripts/bench/grammar.py --json grammar.json

The same for xgrammar, put into a folder of its own, in the environment's interpreter (it needs torch):

    pip install --target /tmp/xgrammar --no-deps xgrammar apache-tvm-ffi transformers pydantic …
    PYTHONPATH=/tmp/xgrammar python scripts/bench/grammar.py --library xgrammar
"""

from __future__ import annotations

import argparse
import asyncio
import importlib
import json
import os
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final

import msgspec
import numpy as np

from headrace.ops.weights.gguf import GgufFile
from headrace.sched.grammar import Grammar
from headrace.sched.matching import Matchers
from headrace.server.models import DEFAULT_MODEL, ModelProblem, cache_folder, resolve
from headrace.server.tokenizer import Tokenizer

REPEATS: Final = 5
ROWS: Final = (1, 32, 256)
STEPS: Final = 40

PERSON: Final[dict[str, Any]] = {
    "type": "object",
    "properties": {
        "name": {"type": "string"},
        "email": {"type": "string"},
        "manager": {"anyOf": [{"$ref": "#/$defs/person"}, {"type": "null"}]},
    },
    "required": ["name", "email", "manager"],
    "additionalProperties": False,
}
ITEM: Final[dict[str, Any]] = {
    "type": "object",
    "properties": {"sku": {"type": "string"}, "count": {"type": "integer", "minimum": 0, "maximum": 10000}},
    "required": ["sku", "count"],
    "additionalProperties": False,
}


def _object(properties: dict[str, Any], **more: Any) -> dict[str, Any]:
    required = list(properties)
    return {"type": "object", "properties": properties, "required": required, "additionalProperties": False, **more}


SCHEMAS: Final[dict[str, tuple[dict[str, Any], Any]]] = {
    "small": (
        _object({"name": {"type": "string"}, "age": {"type": "integer"}}),
        {"name": "The river Thames", "age": 42},
    ),
    "medium": (
        _object(
            {
                "id": {"type": "string", "pattern": "^[A-Z]{2}[0-9]{6}$"},
                "status": {"enum": ["open", "closed", "pending"]},
                "tags": {"type": "array", "items": {"type": "string", "maxLength": 20}, "maxItems": 8},
                "owner": {"$ref": "#/$defs/person"},
                "items": {"type": "array", "items": ITEM},
            },
            **{"$defs": {"person": PERSON}},
        ),
        {
            "id": "AB123456",
            "status": "closed",
            "tags": ["first", "second one"],
            "owner": {"name": "Ada", "email": "ada@example.com", "manager": None},
            "items": [{"sku": "a thing", "count": 7}] * 5,
        },
    ),
    "large": (
        _object(
            {
                f"field_{i}": _object({f"v_{j}": {"type": "string", "maxLength": 50} for j in range(10)})
                for i in range(40)
            }
        ),
        {f"field_{i}": {f"v_{j}": "The river Thames" for j in range(10)} for i in range(40)},
    ),
}
"""A schema, and a text that matches it."""


class SchemaCost(msgspec.Struct):
    schema: str
    schema_bytes: int
    compile_ms: float
    """Median."""
    tokens: int
    mask_us_median: float
    mask_us_mean: float
    mask_us_most: float
    """Of the first text under a compiled grammar: later ones find what it has built."""


class RoundTrip(msgspec.Struct):
    rows: int
    all_masks_ms: float
    """From the ids of a step to the last of its masks, median."""
    loop_us_a_mask: float
    """CPU time of the server's process."""


class Report(msgspec.Struct):
    library: str
    version: str
    imports_torch: bool
    import_ms: float
    vocabulary_ms: float
    costs: list[SchemaCost]
    round_trips: list[RoundTrip]


class Walker:
    """One library: a grammar compiled, and a text walked through it, mask by mask."""

    def __init__(self, compile_schema: Callable[[str], Any], begin: Callable[[Any], tuple[Any, Any]]) -> None:
        self.compile_schema = compile_schema
        self.begin = begin
        """→ (fill a mask, accept an id)."""


def llguidance_walker(tokenizer: Tokenizer) -> Walker:
    from headrace.server.grammar_library import GrammarLibrary

    library = GrammarLibrary.of(tokenizer)
    bits, ends = np.zeros((tokenizer.vocab_size + 31) // 32, np.uint32), frozenset(tokenizer.stop_ids)

    def begin(compiled: Any) -> tuple[Any, Any]:
        matcher = compiled.copy()
        return lambda: matcher.fill(bits, ends), matcher.accept

    return Walker(lambda text: library.compile(Grammar("json_schema", text)), begin)


def xgrammar_walker(tokenizer: Tokenizer) -> Walker:
    xgrammar = importlib.import_module("xgrammar")
    tokens = [tokenizer.token_bytes(index) for index in range(tokenizer.vocab_size)]
    stops = list(tokenizer.stop_ids)
    info = xgrammar.TokenizerInfo(tokens, xgrammar.VocabType.RAW, vocab_size=tokenizer.vocab_size, stop_token_ids=stops)
    bits = xgrammar.allocate_token_bitmask(1, tokenizer.vocab_size)

    def compile_schema(text: str) -> Any:
        return xgrammar.GrammarCompiler(info, max_threads=1, cache_enabled=False).compile_json_schema(text)

    def begin(compiled: Any) -> tuple[Any, Any]:
        matcher = xgrammar.GrammarMatcher(compiled)
        return lambda: matcher.fill_next_token_bitmask(bits), matcher.accept_token

    return Walker(compile_schema, begin)


def schema_cost(name: str, tokenizer: Tokenizer, walker: Walker) -> SchemaCost:
    schema, text = SCHEMAS[name]
    source, ids = json.dumps(schema), tokenizer.encode(json.dumps(text)).tolist()
    compile_ms, first_us = [], []
    for repeat in range(REPEATS):
        begin_s = time.perf_counter()
        compiled = walker.compile_schema(source)
        compile_ms.append((time.perf_counter() - begin_s) * 1e3)
        fill, accept = walker.begin(compiled)
        for token in ids if repeat == 0 else []:
            begin_s = time.perf_counter()
            fill()
            first_us.append((time.perf_counter() - begin_s) * 1e6)
            assert accept(token), f"{tokenizer.token_text(token)!r} is not taken"
    return SchemaCost(
        name,
        len(source),
        statistics.median(compile_ms),
        len(ids),
        statistics.median(first_us),
        statistics.mean(first_us),
        max(first_us),
    )


async def round_trips(model: Path, tokenizer: Tokenizer) -> list[RoundTrip]:
    """Through a real worker, with the engine's own client."""
    from headrace.server.grammar_process import GrammarProcess

    schema, text = SCHEMAS["medium"]
    grammar, ids = Grammar("json_schema", json.dumps(schema)), tokenizer.encode(json.dumps(text)).tolist()
    missing, arrived = 0, asyncio.Event()

    def came(request: int) -> None:
        nonlocal missing
        missing -= 1
        if missing == 0:
            arrived.set()

    def broken(request: int, reason: str, message: str) -> None:
        raise RuntimeError(message)

    async def connect() -> GrammarProcess:
        return GrammarProcess(model)

    matchers, found = Matchers(connect, came, came, broken), []
    async with asyncio.TaskGroup() as tasks:
        serving = tasks.create_task(matchers.serve())
        await matchers.compile(grammar)
        handle = 0
        for rows in ROWS:
            handles = range(handle + 1, handle + rows + 1)
            handle += rows
            missing = rows
            arrived.clear()
            for request in handles:
                matchers.begin(request, grammar, tokenizer.stop_ids)
            await arrived.wait()
            took_ms, cpu_s = [], time.process_time()
            for token in ids[:STEPS]:
                missing = rows
                arrived.clear()
                begin_s = time.perf_counter()
                matchers.advance(list(handles), [token] * rows)
                await arrived.wait()
                took_ms.append((time.perf_counter() - begin_s) * 1e3)
            cpu_us = (time.process_time() - cpu_s) * 1e6
            found.append(RoundTrip(rows, statistics.median(took_ms), cpu_us / (rows * len(took_ms))))
            for request in handles:
                matchers.end(request)
        serving.cancel()
    return found


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--library", choices=("llguidance", "xgrammar"), default="llguidance")
    parser.add_argument("--model", default=DEFAULT_MODEL, help="a GGUF file or a name, for its vocabulary")
    parser.add_argument("--json", type=Path, help="also write the figures to this file")
    arguments = parser.parse_args()
    try:
        path = resolve(arguments.model, cache_folder(os.environ))
    except ModelProblem as problem:
        print(problem, file=sys.stderr)
        return 1
    with GgufFile.open(path) as file:
        tokenizer = Tokenizer.from_gguf_metadata(file.metadata)
    begin_s = time.perf_counter()
    module = importlib.import_module(arguments.library)
    import_ms = (time.perf_counter() - begin_s) * 1e3
    imports_torch = "torch" in sys.modules
    begin_s = time.perf_counter()
    walker = (llguidance_walker if arguments.library == "llguidance" else xgrammar_walker)(tokenizer)
    report = Report(
        arguments.library,
        str(getattr(module, "__version__", "?")),
        imports_torch,
        import_ms,
        (time.perf_counter() - begin_s) * 1e3,
        [schema_cost(name, tokenizer, walker) for name in SCHEMAS],
        asyncio.run(round_trips(path, tokenizer)) if arguments.library == "llguidance" else [],
    )
    show(report)
    if arguments.json is not None:
        arguments.json.write_bytes(msgspec.json.format(msgspec.json.encode(report)))
    return 0


def show(report: Report) -> None:
    torch = "with torch" if report.imports_torch else "without torch"
    print(f"{report.library} {report.version}: import {report.import_ms:.0f} ms, {torch}; ", end="")
    print(f"vocabulary {report.vocabulary_ms:.0f} ms")
    print(
        f"{'schema':>8} {'bytes':>7} {'compile ms':>11} {'tokens':>7} {'mask µs: median':>16} {'mean':>6} {'most':>7}"
    )
    for cost in report.costs:
        print(
            f"{cost.schema:>8} {cost.schema_bytes:>7} {cost.compile_ms:>11.2f} {cost.tokens:>7} "
            f"{cost.mask_us_median:>16.0f} {cost.mask_us_mean:>6.0f} {cost.mask_us_most:>7.0f}"
        )
    for trip in report.round_trips:
        print(f"{trip.rows:>4} rows: all masks {trip.all_masks_ms:.2f} ms after the ids, ", end="")
        print(f"{trip.loop_us_a_mask:.0f} µs of the loop a mask")


if __name__ == "__main__":
    sys.exit(main())
