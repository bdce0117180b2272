"""Runs a user's script from within a command, as `python SCRIPT` would.

In: a path and the script's own arguments. Out: its exit status. Used by `explain` and `cache warm`.
"""

from __future__ import annotations

import argparse
import runpy
import sys
from collections.abc import Callable
from contextlib import AbstractContextManager
from pathlib import Path

from lazy_tensor.cli.errors import CommandError


def add_script(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("script", help="a Python program")
    parser.add_argument(
        "arguments", nargs=argparse.REMAINDER, metavar="...", help="the program's own arguments"
    )


def run_script(
    args: argparse.Namespace, within: Callable[[], AbstractContextManager[object]]
) -> int:
    """Run `args.script` as the main program, inside the context that `within` makes.

    Returns the script's exit status. CommandError if there is no such file; other errors are the
    script's own.
    """
    path = Path(args.script)
    if not path.is_file():
        raise CommandError(f"there is no file {args.script!r}")
    # as Python sets them for a script: its own folder is the first to be searched for modules
    argv, first = sys.argv, sys.path[0]
    sys.argv, sys.path[0] = [args.script, *args.arguments], str(path.resolve().parent)
    try:
        with within():
            runpy.run_path(args.script, run_name="__main__")
    except SystemExit as exit_:
        # `sys.exit("message")` prints the message, and exits with 1; `sys.exit()` with 0
        if isinstance(exit_.code, str):
            print(exit_.code, file=sys.stderr)
            return 1
        return exit_.code or 0
    finally:
        sys.argv, sys.path[0] = argv, first
    return 0
