"""The grammar worker's process as the server sees it."""

from __future__ import annotations

import os

from headrace.ops.child_link import ChildLink
from headrace.sched.grammar import MAX_MESSAGE_BYTES


class GrammarProcess(ChildLink):
    """A connection to `python -m headrace.server.grammar_worker`."""

    def __init__(self, model_path: str | os.PathLike[str]) -> None:
        """Start the process; raises OSError where the system refuses. Open the transport in the same turn of the
        loop."""
        super().__init__(
            "headrace.server.grammar_worker",
            "the grammar worker",
            ["--model", os.fspath(model_path)],
            [],
            MAX_MESSAGE_BYTES,
        )
