"""What was compiled is kept for the next start, where it can be."""

from __future__ import annotations

import logging
import subprocess
import sys
from pathlib import Path

import pytest

from headrace.ops.simd.compiler import _writable

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


def test_a_folder_that_cannot_be_written_costs_the_next_start_and_says_so(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "file").write_text("not a folder")
    with caplog.at_level(logging.WARNING):
        assert _writable(tmp_path / "file" / "kernels") is None
    assert "every start compiles them anew" in caplog.text
