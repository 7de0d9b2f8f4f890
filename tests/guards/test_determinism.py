"""sched/ and kvcache/ are pure functions of their messages and their clock: one seed gives one trace.

So they may not look at the wall clock, draw from a global generator, start threads, touch file descriptors, or depend
on the order of a set, on `hash()` or on an order by `id` — these change with PYTHONHASHSEED and with memory addresses.
"""

import ast
from collections.abc import Iterator
from typing import Final

import pytest
from guards.source import Fault, Source, dotted, imported_modules, parse, report, sources

TRANSPORT_SIDE: Final = frozenset(("sched/executors/worker_process.py",))
"""Where a real process, its socket and its shared memory are made: what simulation replaces."""
AGENT_SIDE: Final = ("kvcache/storage/agent.py", "kvcache/storage/agent_lanes.py", "kvcache/storage/disk/")
"""What runs in the storage agent's own process: it may block, and uses a few I/O threads."""

MODULES: Final = {
    "time": "the clock is passed in",
    "datetime": "the clock is passed in",
    "random": "a generator is passed in, seeded",
    "secrets": "a generator is passed in, seeded",
    "uuid": "a generator is passed in, seeded",
    "threading": "there is one thread",
    "_thread": "there is one thread",
    "queue": "there is one thread",
    "concurrent": "there is one thread",
    "subprocess": "processes are the transports' business",
    "socket": "sockets are the transports' business",
    "select": "sockets are the transports' business",
    "selectors": "sockets are the transports' business",
    "mmap": "shared memory is made by the transports, handed in as a buffer",
    "fcntl": "files are the storage agent's business",
    "signal": "signals are the server's business",
    "os": "files and processes are the transports' business",
}
CALLS: Final = {
    "open": "files are the storage agent's business",
    "hash": "it changes with PYTHONHASHSEED",
    "input": "there is nobody to ask",
    "asyncio.to_thread": "there is one thread",
}
METHODS: Final = {
    "run_in_executor": "there is one thread",
    "add_reader": "sockets are the transports' business",
    "add_writer": "sockets are the transports' business",
    "call_soon_threadsafe": "there is one thread",
}
GLOBAL_RANDOM: Final = ("np.random.", "numpy.random.")


def impurities(source: Source) -> list[Fault]:
    """Everything by which a run could differ from another with the same seed."""
    return [*_imports(source), *_calls(source), *_set_order(source)]


def _imports(source: Source) -> Iterator[Fault]:
    for line, module in sorted({(line, module.partition(".")[0]) for line, module in imported_modules(source.tree)}):
        if module in MODULES:
            yield Fault(source.path, line, f"{module} is imported: {MODULES[module]}")


def _calls(source: Source) -> Iterator[Fault]:
    for node in ast.walk(source.tree):
        if not isinstance(node, ast.Call):
            continue
        name = dotted(node.func)
        method = name.rpartition(".")[2]
        if name in CALLS:
            yield Fault(source.path, node.lineno, f"{name}(): {CALLS[name]}")
        elif method in METHODS:
            yield Fault(source.path, node.lineno, f"{name}(): {METHODS[method]}")
        elif name.startswith(GLOBAL_RANDOM) and not (method == "default_rng" and node.args):
            yield Fault(source.path, node.lineno, f"{name}(): a generator is passed in, seeded")
        for keyword in node.keywords:
            if keyword.arg == "key" and dotted(keyword.value) in ("id", "hash"):
                yield Fault(
                    source.path, node.lineno, f"{name}(): an order by {dotted(keyword.value)} changes every run"
                )


# What takes its elements in the order in which they come. `sorted`, `len`, `min`, `max`, `sum`, `any`, `all`, `set` and
# membership don't care.
_ORDERED: Final = frozenset(("list", "tuple", "iter", "enumerate", "zip", "map", "filter", "next", "reversed", "dict"))


def _set_order(source: Source) -> Iterator[Fault]:
    names = _set_names(source.tree)
    for node in ast.walk(source.tree):
        for taken in _taken_in_order(node):
            if _is_set(taken, names):
                where = getattr(taken, "lineno", 0)
                yield Fault(source.path, where, f"the order of a set: {ast.unparse(taken)}; keep a dict, or sort it")
        match node:
            case ast.Call(func=ast.Attribute(value=popped, attr="pop"), args=[]) if _is_set(popped, names):
                yield Fault(source.path, node.lineno, f"{ast.unparse(node)} takes any element of a set; keep a dict")


def _taken_in_order(node: ast.AST) -> Iterator[ast.expr]:
    if isinstance(node, ast.For | ast.AsyncFor | ast.comprehension):
        yield node.iter
    elif isinstance(node, ast.Starred):
        yield node.value
    elif isinstance(node, ast.Call) and (dotted(node.func) in _ORDERED or dotted(node.func).endswith(".join")):
        yield from node.args


def _set_names(tree: ast.AST) -> set[str]:
    """Names and attributes that the file declares or fills as sets."""
    names = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.AnnAssign) and _says_set(node.annotation):
            names.add(dotted(node.target))
        elif isinstance(node, ast.arg) and node.annotation is not None and _says_set(node.annotation):
            names.add(node.arg)
        elif isinstance(node, ast.Assign) and _is_set(node.value, set()):
            names.update(dotted(target) for target in node.targets)
    # A class declares `pages: set[int]` in its body, and its methods say `self.pages`.
    return names | {f"self.{name}" for name in names if "." not in name}


def _says_set(annotation: ast.expr) -> bool:
    outer = annotation.value if isinstance(annotation, ast.Subscript) else annotation
    return dotted(outer).rpartition(".")[2] in ("set", "frozenset", "Set", "AbstractSet", "MutableSet")


def _is_set(node: ast.expr, names: set[str]) -> bool:
    if isinstance(node, ast.Set | ast.SetComp):
        return True
    if isinstance(node, ast.BinOp) and isinstance(node.op, ast.BitOr | ast.BitAnd | ast.Sub | ast.BitXor):
        return _is_set(node.left, names) or _is_set(node.right, names)
    if isinstance(node, ast.Call):
        if isinstance(node.func, ast.Subscript):
            return dotted(node.func.value) in ("set", "frozenset")
        return dotted(node.func) in ("set", "frozenset")
    return dotted(node) in names


@pytest.mark.parametrize("floor", ["sched", "kvcache"])
def test_the_scheduler_and_the_cache_depend_on_nothing_but_their_input(floor: str) -> None:
    here = [source for source in sources(floor) if not source.path.startswith((*TRANSPORT_SIDE, *AGENT_SIDE))]
    faults = [fault for source in here for fault in impurities(source)]
    assert faults == [], report(faults)


def test_the_exceptions_still_exist_and_still_need_to_be_one() -> None:
    found = {source.path: source for source in sources("sched", "kvcache")}
    assert {path for path in TRANSPORT_SIDE if path not in found or not impurities(found[path])} == set()


@pytest.mark.parametrize(
    "text",
    [
        "import time",
        "from time import monotonic",
        "from random import Random",
        "import threading",
        "from concurrent.futures import ThreadPoolExecutor",
        "import os",
        "with open(path) as f: pass",
        "await asyncio.to_thread(f)",
        "loop.run_in_executor(None, f)",
        "np.random.rand(3)",
        "rng = np.random.default_rng()",
        "order = sorted(pages, key=id)",
        "bucket = hash(key) % 8",
        "for page in {1, 2}: pass",
        "for page in set(pages): pass",
        "first = next(iter(frozenset(pages)))",
        "names = ', '.join({str(p) for p in pages})",
        "pages = [*set(found)]",
        "pages = [p for p in a_set | {1}]",
        "pages: set[int] = f()\nfor page in pages: pass",
        "class A:\n    pages: set[int]\n    def f(self):\n        return list(self.pages)",
        "self.pages = set()\nself.pages.pop()",
        "def f(pages: frozenset[int]):\n    return tuple(pages)",
        "seen = set[int]()\nfor page in seen: pass",
    ],
)
def test_the_guard_sees_what_differs_from_run_to_run(text: str) -> None:
    assert impurities(parse("sched/a.py", _in_a_coroutine(text)))


@pytest.mark.parametrize(
    "text",
    [
        "for page in sorted({1, 2}): pass",
        "seen: set[int] = set()\nif page in seen: n = len(seen)",
        "both = a & {1}\ntotal = sum({1, 2})",
        "pages = {1: 2}\nfor page in pages: pass\npages.pop(1)",
        "pages = [1]\npages.pop()",
        "now = self._loop.time()",
        "counts = {id(page): 1}",
        "noise = np.random.default_rng(0)",
    ],
)
def test_the_guard_lets_what_is_the_same_in_every_run(text: str) -> None:
    assert impurities(parse("sched/a.py", _in_a_coroutine(text))) == []


def _in_a_coroutine(text: str) -> str:
    return "async def f():\n" + "\n".join(f"    {line}" for line in text.splitlines())
