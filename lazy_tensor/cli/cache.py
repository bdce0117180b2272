"""`python -m lazy_tensor cache list|clear|warm`: shows, deletes or builds the kernels on disk.

In: the folder that the option `cache_dir` names. An *artifact* is a file in it: a compiled kernel,
or compiled C++ of the package.
"""

from __future__ import annotations

import argparse
import time
from pathlib import Path

import lazy_tensor
from lazy_tensor.cli.script import add_script, run_script
from lazy_tensor.dispatch import settings
from lazy_tensor.dispatch.run.compile_service import obtain_extensions
from lazy_tensor.kernels import disk
from lazy_tensor.reports.flushes import amount

MOST_LISTED = 20


def add_arguments(parser: argparse.ArgumentParser) -> None:
    actions = parser.add_subparsers(dest="action", metavar="ACTION", required=True)
    listing = actions.add_parser("list", help="show what is kept, last used first")
    listing.set_defaults(act=_list)
    clearing = actions.add_parser("clear", help="delete it")
    clearing.set_defaults(act=_clear)
    warming = actions.add_parser(
        "warm", help="run a program, waiting for all that is compiled, so that later runs have it"
    )
    add_script(warming)
    warming.set_defaults(act=_warm)


def run(args: argparse.Namespace) -> int:
    status: int = args.act(args)
    return status


def _folder() -> Path:
    return Path(settings.current().cache_dir)


def _list(_: argparse.Namespace) -> int:
    # entries are ordered by when they were used
    found = sorted(disk.entries(_folder()), reverse=True)
    total = sum(entry.n_bytes for entry in found)
    print(f"{_folder()}: {len(found)} artifacts, {amount(total)}")
    for entry in found[:MOST_LISTED]:
        used = f"used {_ago(time.time() - entry.used_s)}"
        print(f"  {entry.path.stem[:12]}  {amount(entry.n_bytes):>10}  {used:<17}  {entry.about}")
    if len(found) > MOST_LISTED:
        print(f"  and {len(found) - MOST_LISTED} more")
    return 0


def _ago(seconds: float) -> str:
    """A time in the past in words, as `3 hours ago`."""
    for unit, length_s in (("day", 86400), ("hour", 3600), ("minute", 60)):
        n = int(seconds // length_s)
        if n:
            return f"{n} {unit}{'s' * (n > 1)} ago"
    return "just now"


def _clear(_: argparse.Namespace) -> int:
    found = list(disk.entries(_folder()))
    for entry in found:
        entry.path.unlink(missing_ok=True)
    print(f"deleted {len(found)} artifacts, {amount(sum(entry.n_bytes for entry in found))}")
    return 0


def _warm(args: argparse.Namespace) -> int:
    before = len(list(disk.entries(_folder())))
    # each kernel is waited for, and built at its first run: the program may run each only once
    lazy_tensor.configure(compile="blocking", compile_threshold=1)
    obtain_extensions()
    status = run_script(args, lazy_tensor.lazy_mode)
    print(f"{len(list(disk.entries(_folder()))) - before} artifacts more in {_folder()}")
    return status
