"""Running a user's script as `python SCRIPT` would, from within a command."""

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
    """Run `args.script` within a context, as the main program; its exit status.

    CommandError if there is no such file. What the script raises passes through.
    """
    path = Path(args.script)
    if not path.is_file():
        raise CommandError(f"there is no file {args.script!r}")
    argv, first = sys.argv, sys.path[0]
    sys.argv, sys.path[0] = [args.script, *args.arguments], str(path.resolve().parent)
    try:
        with within():
            runpy.run_path(args.script, run_name="__main__")
    except SystemExit as exit_:
        if isinstance(exit_.code, str):
            print(exit_.code, file=sys.stderr)
            return 1
        return exit_.code or 0
    finally:
        sys.argv, sys.path[0] = argv, first
    return 0
