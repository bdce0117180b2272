"""Parses the command line and runs a subcommand. In: arguments. Out: the exit status.

Each subcommand is a module with `add_arguments(parser)` and `run(args)`.
"""

from __future__ import annotations

import argparse
import os
import select
import sys
from collections.abc import Sequence
from typing import TextIO

import torch

import lazy_tensor
from lazy_tensor.cli import cache, doctor, explain
from lazy_tensor.cli.errors import BAD_REQUEST, INTERRUPTED, NOBODY_READS, CommandError


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command. Returns 0 on success, 2 (and a line on stderr) for a request that can't be
    met, 130 after Ctrl-C, and 141 if the reader of stdout has ended (`| head`)."""
    try:
        try:
            return _run(argv)
        finally:
            # Python flushes at its exit, where an error can't be caught any more
            sys.stdout.flush()
    except BrokenPipeError:
        # the pipe may be one of the user's program, whose error it is
        if not _is_closed(sys.stdout):
            raise
        # what is left in the buffer goes nowhere, so that the flush at exit can't fail
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return NOBODY_READS


def _is_closed(stream: TextIO) -> bool:
    """Whether `stream` is a pipe whose reader has closed it."""
    poll = select.poll()
    poll.register(stream, 0)
    return any(event & (select.POLLERR | select.POLLHUP) for _, event in poll.poll(0))


def _run(argv: Sequence[str] | None) -> int:
    args = parser().parse_args(argv)
    try:
        status: int = args.run(args)
    except CommandError as error:
        print(f"lazy_tensor {args.command}: {error}", file=sys.stderr)
        return BAD_REQUEST
    except KeyboardInterrupt:
        return INTERRUPTED
    return status


def parser() -> argparse.ArgumentParser:
    top = argparse.ArgumentParser(
        prog="python -m lazy_tensor", description="Lazy tensors for PyTorch."
    )
    versions = f"lazy_tensor {lazy_tensor.__version__}, torch {torch.__version__}"
    top.add_argument("--version", action="version", version=versions)
    commands = top.add_subparsers(dest="command", metavar="COMMAND", required=True)
    for name, module, summary in (
        ("doctor", doctor, "show versions, devices, backends, settings and caches"),
        ("explain", explain, "run a program lazily and report on what was flushed, and why"),
        ("cache", cache, "list, clear or warm the kernels on disk"),
    ):
        description = f"{summary[0].upper()}{summary[1:]}."
        command = commands.add_parser(name, help=summary, description=description)
        module.add_arguments(command)
        command.set_defaults(run=module.run)
    return top
