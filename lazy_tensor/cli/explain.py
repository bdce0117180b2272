"""`python -m lazy_tensor explain SCRIPT`: runs a program in `lazy_mode` and reports on its flushes.

Arguments after the script belong to the script, `--out` too: many scripts have such an option. If
the script then wrote no file of that name, `--out` was meant for the report, and a line on stderr
says where it belongs.
"""

from __future__ import annotations

import argparse
import shlex
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
    # the file of an `--out` that the script was given, and when it was written before the run
    theirs = None if args.out is not None else out_among(args.arguments)
    before = _written_s(theirs)
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
    finally:
        if theirs is not None and _written_s(theirs) == before:
            print(where_it_belongs(theirs, args), file=sys.stderr)
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


def out_among(arguments: list[str]) -> str | None:
    """The file after an `--out` among the script's arguments; None if there is no `--out`."""
    for i, argument in enumerate(arguments):
        name, _, file = argument.partition("=")
        if name == "--out":
            return file or next(iter(arguments[i + 1 :]), "FILE.html")
    return None


def where_it_belongs(file: str, args: argparse.Namespace) -> str:
    """The line on stderr that says how to have the report in `file`."""
    rest = [word for word in args.arguments if word not in ("--out", f"--out={file}", file)]
    command = shlex.join(["--out", file, args.script, *rest])
    return (
        f"lazy_tensor explain: --out {file} stands after {args.script} and was given to it, which "
        f"wrote no such file; to have the report there: python -m lazy_tensor explain {command}"
    )


def _written_s(file: str | None) -> float | None:
    """The time at which a file was written last; None if there is no such file."""
    path = Path(file or "")
    return path.stat().st_mtime if path.is_file() else None
