"""`python -m lazy_tensor explain SCRIPT`: runs a program in `lazy_mode` and reports on its flushes.

Arguments after the script belong to the script, `--out` too: many scripts have such an option.
"""

from __future__ import annotations

import argparse
import sys
import traceback
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path

import lazy_tensor
from lazy_tensor.cli.errors import INTERRUPTED, CommandError
from lazy_tensor.cli.script import add_script, run_script


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add(
        "--out",
        type=Path,
        metavar="FILE.html",
        help="write the report as a page as well; stands before the script",
    )
    add("--as-is", action="store_true", help="don't put the program into lazy_mode: it does itself")
    add_script(parser)


def run(args: argparse.Namespace) -> int:
    if args.out is not None and args.out.suffix != ".html":
        raise CommandError(f"--out {args.out} must end in .html")
    try:
        status = run_script(args, nullcontext if args.as_is else lazy_tensor.lazy_mode)
    except (CommandError, BrokenPipeError):
        raise
    except Exception:
        # the script failed: the report is on what ran before
        traceback.print_exc()
        status = 1
    except KeyboardInterrupt:
        status = INTERRUPTED
    report = lazy_tensor.explain()
    if args.out is not None:
        # saved before it is printed: a closed pipe (`| head`) ends the printing with an error
        report.save(args.out)
    # only for a terminal: rich breaks the lines of a file at 80 columns
    printed = rich_print() if sys.stdout.isatty() else print
    printed(report)
    if args.out is not None:
        print(f"wrote {args.out}")
    return status


def rich_print() -> Callable[[object], None]:
    """rich's `print`, which shows colours; Python's where rich isn't installed."""
    try:
        import rich
    except ModuleNotFoundError:
        return print
    return rich.print
