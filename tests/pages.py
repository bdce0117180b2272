"""What the pages of `benches/results` that tests write have in common."""

from __future__ import annotations

import subprocess
from collections.abc import Iterable, Sequence
from pathlib import Path

ROOT = Path(__file__).parent.parent


def commit() -> str:
    """The checkout's, as pages and results name it."""
    return subprocess.run(
        ["git", "rev-parse", "--short=12", "HEAD"],
        cwd=ROOT, capture_output=True, text=True, check=True,
    ).stdout.strip()  # fmt: skip


def table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """In Markdown, with its last line's end."""
    lines = (head, ["---"] * len(head), *rows)
    return "".join("| " + " | ".join(line) + " |\n" for line in lines)


def section(title: str, items: Iterable[str]) -> str:
    """A list under its title, or "Nothing."."""
    return f"\n## {title}\n\n" + ("".join(f"- {item}\n" for item in items) or "Nothing.\n")
