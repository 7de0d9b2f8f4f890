"""What was compiled is kept for the next start, where it can be."""

from __future__ import annotations

import logging
import os
import subprocess
import sys
from pathlib import Path

import pytest

from headrace.ops.simd.compiler import KEPT_VERSIONS, _prune, _writable

PREPARE = """
import sys
from headrace.ops.simd.compiler import prepare
compiled = []
prepare("bfloat16", "bfloat16", sys.argv[1], lambda done, total: compiled.append((done, total)))
print(compiled[-1] if compiled else "loaded")
"""


def prepared(folder: Path) -> str:
    """What a fresh process says of its kernels."""
    done = subprocess.run(
        [sys.executable, "-P", "-c", PREPARE, str(folder)], capture_output=True, text=True, timeout=600, check=True
    )
    return done.stdout.strip()


def test_the_second_start_loads_what_the_first_compiled(tmp_path: Path) -> None:
    compiled = prepared(tmp_path)
    done, total = compiled.strip("()").split(", ")
    assert done == total
    assert prepared(tmp_path) == "loaded"


KEEP = """
import sys
from headrace.ops.simd import blocks, compiler
compiler.keep(sys.argv[1])
blocks.decode("Q4_K", blocks.np.zeros((1, 144), "u1"), blocks.np.zeros((1, 256), "f4"))
print(blocks.DECODERS["Q4_K"].stats.cache_hits.total())
"""


def test_what_decodes_stored_blocks_is_kept_too(tmp_path: Path) -> None:
    def hits() -> str:
        return subprocess.run(
            [sys.executable, "-P", "-c", KEEP, str(tmp_path)], capture_output=True, text=True, timeout=600, check=True
        ).stdout.strip()

    assert (hits(), hits()) == ("0", "1")


def test_a_folder_that_cannot_be_written_costs_the_next_start_and_says_so(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "file").write_text("not a folder")
    with caplog.at_level(logging.WARNING):
        assert _writable(tmp_path / "file" / "kernels") is None
    assert "every start compiles them anew" in caplog.text


def test_versions_that_were_used_longest_ago_are_deleted_and_nothing_else(tmp_path: Path) -> None:
    names = [f"{number:016x}" for number in range(KEPT_VERSIONS + 2)]
    for used_s, name in enumerate(names):
        (tmp_path / name / "package").mkdir(parents=True)
        os.utime(tmp_path / name, (used_s, used_s))
    (tmp_path / "notes").mkdir()
    os.utime(tmp_path / "notes", (0, 0))
    _prune(tmp_path)
    assert sorted(path.name for path in tmp_path.iterdir()) == [*names[2:], "notes"]
