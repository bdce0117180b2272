"""Parses the command line and runs a subcommand. In: arguments. Out: the exit status."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence

from lazy_tensor.cli import bench, cache, demo, doctor, explain
from lazy_tensor.cli.errors import BAD_REQUEST, INTERRUPTED, CommandError


def main(argv: Sequence[str] | None = None) -> int:
    """0 on success, 2 and a line on stderr for a request that can't be met, 130 after Ctrl-C."""
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
    commands = top.add_subparsers(dest="command", metavar="COMMAND", required=True)
    for name, module, summary in (
        ("demo", demo, "train a small GPT eagerly and lazily, side by side"),
        ("doctor", doctor, "show versions, devices, backends, settings and caches"),
        ("explain", explain, "run a program lazily and report on what was flushed, and why"),
        ("cache", cache, "list, clear or warm the kernels on disk"),
        ("bench", bench, "run the benchmarks of a checkout"),
    ):
        description = f"{summary[0].upper()}{summary[1:]}."
        command = commands.add_parser(name, help=summary, description=description)
        module.add_arguments(command)
        command.set_defaults(run=module.run)
    return top
