"""A page of benchmark results in markdown, which says how they were made.

In: a title, columns, rows of text, notes. Out: the text of a page for `benches/results`.
"""

from __future__ import annotations

import platform
import shlex
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import torch


def page(
    title: str, columns: Sequence[str], rows: Sequence[Sequence[str]], notes: Sequence[str] = ()
) -> str:
    """The page: a heading, device and versions and commit and command, `notes`, and one table. Each
    row has a cell for each column."""
    lines = [f"# {title}", "", *circumstances(), *(f"- {note}" for note in notes), ""]
    lines += [line_of(columns), line_of(["---"] * len(columns)), *map(line_of, rows)]
    return "\n".join(lines) + "\n"


def seconds_text(seconds: float) -> str:
    return f"{seconds:.2f} s" if seconds >= 1 else f"{seconds * 1e3:.1f} ms"


def bytes_text(n_bytes: float) -> str:
    return f"{n_bytes / 2**20:,.0f} MiB"


def line_of(cells: Sequence[str]) -> str:
    return f"| {' | '.join(cells)} |"


def circumstances() -> list[str]:
    """Device, versions, commit and command, as items of a list."""
    command = shlex.join([Path(sys.argv[0]).name, *sys.argv[1:]])
    return [
        f"- device: {device_name()}",
        f"- torch {torch.__version__}, Python {platform.python_version()}",
        f"- commit: {commit()}",
        f"- command: `{command}`",
    ]


def device_name() -> str:
    cpu = f"{cpu_name()}, {torch.get_num_threads()} threads"
    return f"{torch.cuda.get_device_name()}; {cpu}" if torch.cuda.is_available() else cpu


def cpu_name() -> str:
    info = Path("/proc/cpuinfo")
    lines = info.read_text().splitlines() if info.exists() else []
    names = (line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    return next(names, platform.machine())


def commit() -> str:
    """The checkout's commit, with "-dirty" if files differ from it; "none" outside of one."""
    git = ["git", "-C", str(Path(__file__).parent)]
    try:
        answer = subprocess.run(
            [*git, "describe", "--always", "--dirty", "--abbrev=12"],
            capture_output=True,
            text=True,
            check=False,
        )
    # git is not installed
    except FileNotFoundError:
        return "none"
    return answer.stdout.strip() or "none"
