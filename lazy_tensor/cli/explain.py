"""`python -m lazy_tensor explain SCRIPT`: run a program lazily, then report on its last flushes."""

from __future__ import annotations

import argparse
from contextlib import nullcontext
from pathlib import Path

import lazy_tensor
from lazy_tensor.cli.errors import CommandError
from lazy_tensor.cli.script import add_script, run_script


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("--out", type=Path, metavar="FILE.html", help="write the report as a page as well")
    add("--as-is", action="store_true", help="don't put the program into lazy_mode: it does itself")
    add_script(parser)


def run(args: argparse.Namespace) -> int:
    if args.out is not None and args.out.suffix != ".html":
        raise CommandError(f"--out {args.out} must end in .html")
    status = run_script(args, nullcontext if args.as_is else lazy_tensor.lazy_mode)
    report = lazy_tensor.explain()
    try:
        import rich
    except ModuleNotFoundError:
        print(report)
    else:
        rich.print(report)
    if args.out is not None:
        report.save(args.out)
        print(f"wrote {args.out}")
    return status
