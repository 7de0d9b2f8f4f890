"""What no file may do, wherever it stands: run data as code, read the environment, start orphans, grow too long."""

import ast
from collections.abc import Iterator
from typing import Final

import pytest
from guards.source import FLOORS, ROOT, Fault, Source, dotted, imported_modules, parse, report, sources, tracked_files

EXECUTING_MODULES: Final = frozenset(
    ("pickle", "cPickle", "_pickle", "marshal", "shelve", "dill", "cloudpickle", "joblib", "multiprocessing")
)
"""Loading their data runs code of whoever wrote it; multiprocessing pickles what it sends."""
EXECUTING_CALLS: Final = frozenset(
    ("eval", "exec", "compile", "torch.load", "torch.save", "yaml.load", "yaml.unsafe_load", "numpy.load", "np.load")
)
ENVIRONMENT_READERS: Final = frozenset(("server/config.py",))
TASK_OWNERS: Final = frozenset(("server/sim/world.py",))
"""A context manager whose one task ends, and is awaited, when the context does."""
MOST_LINES: Final = 600


def executed_data(source: Source) -> list[Fault]:
    faults = [
        Fault(source.path, line, f"{module} runs code that comes with the data")
        for line, module in imported_modules(source.tree)
        if module.split(".")[0] in EXECUTING_MODULES or module in ("concurrent.futures.ProcessPoolExecutor",)
    ]
    for node in ast.walk(source.tree):
        if isinstance(node, ast.Call) and (name := dotted(node.func)) in EXECUTING_CALLS:
            faults.append(Fault(source.path, node.lineno, f"{name}() runs code that comes with the data"))
    return faults


def environment_reads(source: Source) -> list[Fault]:
    """`os.environ` and its like, except where the whole of it is handed to a child process: `env={**os.environ, …}`."""
    handed_on = {
        id(value)
        for call in ast.walk(source.tree)
        if isinstance(call, ast.Call)
        for keyword in call.keywords
        if keyword.arg == "env" and isinstance(keyword.value, ast.Dict)
        for key, value in zip(keyword.value.keys, keyword.value.values)
        if key is None
    }
    faults = [
        Fault(source.path, line, f"{module} is imported; settings come from server/config.py")
        for line, module in imported_modules(source.tree)
        if module in ("os.environ", "os.environb", "os.getenv", "os.getenvb")
    ]
    for node in ast.walk(source.tree):
        if isinstance(node, ast.Attribute) and id(node) not in handed_on:
            name = dotted(node)
            if name in ("os.environ", "os.environb", "os.getenv", "os.getenvb"):
                faults.append(Fault(source.path, node.lineno, f"{name} is read; settings come from server/config.py"))
    return faults


def orphan_tasks(source: Source) -> list[Fault]:
    """Tasks without a parent: `asyncio.create_task`, `loop.create_task`, `ensure_future`. A TaskGroup's are fine."""
    return list(_orphans(source))


def _orphans(source: Source) -> Iterator[Fault]:
    groups = {
        item.optional_vars.id
        for node in ast.walk(source.tree)
        if isinstance(node, ast.AsyncWith)
        for item in node.items
        if isinstance(item.optional_vars, ast.Name) and dotted(item.context_expr).endswith("TaskGroup()")
    } | {
        argument.arg
        for node in ast.walk(source.tree)
        if isinstance(node, ast.arguments)
        for argument in (*node.posonlyargs, *node.args, *node.kwonlyargs)
        if argument.annotation is not None and "TaskGroup" in ast.unparse(argument.annotation)
    }
    for node in ast.walk(source.tree):
        if not isinstance(node, ast.Call):
            continue
        owner, _, method = dotted(node.func).rpartition(".")
        if method == "ensure_future" or (method == "create_task" and owner not in groups):
            yield Fault(source.path, node.lineno, f"{dotted(node.func)}() makes a task that no TaskGroup owns")


def swallowed_exceptions(source: Source) -> list[Fault]:
    """`except:` and `except (Base)Exception:` whose body does nothing."""
    faults = []
    for node in ast.walk(source.tree):
        if not isinstance(node, ast.ExceptHandler):
            continue
        broad = node.type is None or dotted(node.type) in ("Exception", "BaseException")
        if broad and all(isinstance(part, ast.Pass | ast.Continue) for part in node.body):
            faults.append(Fault(source.path, node.lineno, "any exception is swallowed"))
    return faults


def test_nothing_runs_code_that_comes_with_data() -> None:
    faults = [fault for source in sources(*FLOORS, "scripts", "tests") for fault in executed_data(source)]
    assert faults == [], report(faults)


def test_the_environment_is_read_by_the_settings_alone() -> None:
    faults = [
        fault
        for source in sources(*FLOORS)
        if source.path not in ENVIRONMENT_READERS
        for fault in environment_reads(source)
    ]
    assert faults == [], report(faults)


def test_every_task_has_a_parent() -> None:
    faults = [fault for source in sources(*FLOORS) if source.path not in TASK_OWNERS for fault in orphan_tasks(source)]
    assert faults == [], report(faults)


def test_the_exceptions_still_exist_and_still_need_to_be_one() -> None:
    found = {source.path: source for source in sources(*FLOORS)}
    assert {path for path in TASK_OWNERS if path not in found or not orphan_tasks(found[path])} == set()
    assert {path for path in ENVIRONMENT_READERS if path not in found or not environment_reads(found[path])} == set()


def test_no_exception_is_swallowed_unseen() -> None:
    faults = [fault for source in sources(*FLOORS, "scripts") for fault in swallowed_exceptions(source)]
    assert faults == [], report(faults)


def test_no_file_holds_more_than_one_idea() -> None:
    long = {
        source.path: lines
        for source in sources(*FLOORS, "scripts", "tests")
        if (lines := (ROOT / source.path).read_text().count("\n")) > MOST_LINES
    }
    assert long == {}, f"more than {MOST_LINES} lines: look for the second idea in each"


def test_no_file_is_a_drawer_for_everything() -> None:
    drawers = ("utils", "util", "helpers", "helper", "common", "manager", "base", "misc")
    names = [source.path for source in sources(*FLOORS, "scripts", "tests")]
    assert [name for name in names if name.rpartition("/")[2].removesuffix(".py") in drawers] == []


def test_the_top_level_holds_the_packages_and_little_else() -> None:
    allowed = {"pyproject.toml", "README.md", "LICENSE", *FLOORS, "tests", "scripts", "docs"}
    at_the_top = {path.partition("/")[0] for path in tracked_files()}
    assert {name for name in at_the_top if not name.startswith(".")} - allowed == set()


@pytest.mark.parametrize(
    "text",
    [
        "import pickle",
        "from marshal import loads",
        "def f():\n    import multiprocessing.pool",
        "import torch\nx = torch.load(path)",
        "eval(text)",
        "import yaml\nyaml.load(text, Loader=x)",
    ],
)
def test_the_guard_sees_data_that_is_run(text: str) -> None:
    assert executed_data(parse("ops/a.py", text))


def test_the_guard_lets_a_model_be_put_into_eval_mode() -> None:
    assert executed_data(parse("ops/a.py", "model.eval()")) == []


@pytest.mark.parametrize(
    "text",
    [
        "import os\nx = os.environ['A']",
        "import os\nx = os.getenv('A')",
        "from os import environ",
        "import os\nrun(env={'A': os.environ['B']})",
        "import os\nrun(env={**os.environ}, a=os.environ)",
    ],
)
def test_the_guard_sees_the_environment_being_read(text: str) -> None:
    assert environment_reads(parse("sched/a.py", text))


def test_the_guard_lets_a_child_have_its_parents_environment() -> None:
    assert environment_reads(parse("ops/a.py", "import os\nrun(env={**os.environ, 'A': '1'})")) == []


@pytest.mark.parametrize(
    "text",
    [
        "import asyncio\nasyncio.create_task(f())",
        "asyncio.get_running_loop().create_task(f())",
        "self._loop.create_task(f())",
        "asyncio.ensure_future(f())",
    ],
)
def test_the_guard_sees_a_task_without_a_parent(text: str) -> None:
    assert orphan_tasks(parse("sched/a.py", text))


def test_the_guard_lets_a_task_group_have_tasks() -> None:
    inline = "async def f():\n    async with asyncio.TaskGroup() as stages:\n        stages.create_task(g())"
    given = "def f(stages: asyncio.TaskGroup):\n    stages.create_task(g())"
    assert orphan_tasks(parse("sched/a.py", inline)) == orphan_tasks(parse("sched/a.py", given)) == []


def test_the_guard_sees_a_swallowed_exception() -> None:
    assert swallowed_exceptions(parse("sched/a.py", "try:\n    f()\nexcept Exception:\n    pass"))
    assert swallowed_exceptions(parse("sched/a.py", "try:\n    f()\nexcept:\n    pass"))
    assert swallowed_exceptions(parse("sched/a.py", "try:\n    f()\nexcept OSError:\n    pass")) == []
