"""Flags of a command as a table: what `--help` prints of them, and the parser's part for each."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple, TypeAlias

from headrace.server.config import flag_of


class Flag(NamedTuple):
    """A flag sets the field that has its name; its value stays text, for whoever reads and checks the field."""

    field: str
    value: str
    """What stands for the value in --help: its unit, or its kind. Empty for a switch."""
    help: str
    """What it does; where the field's default is None, what is done then."""
    aliases: tuple[str, ...] = ()
    """Other flags that mean the same."""


FlagTable: TypeAlias = Mapping[str, tuple[Flag, ...]]
"""Titles of groups, and their flags."""


def add_flags(
    parser: argparse.ArgumentParser, table: FlagTable, describe: Callable[[Flag], str] = lambda flag: flag.help
) -> None:
    """Give a parser the flags of a table; one that is not given leaves no trace. `describe`: its text in --help."""
    for title, flags in table.items():
        group = parser.add_argument_group(title)
        for flag in flags:
            takes: dict[str, Any] = {"metavar": flag.value} if flag.value else {"action": "store_true"}
            group.add_argument(
                flag_of(flag.field),
                *flag.aliases,
                dest=flag.field,
                default=argparse.SUPPRESS,
                help=describe(flag).replace("%", "%%"),
                **takes,
            )
