"""Places in a program as people read them: files in short, cells of a notebook by number.

In: `path:line`, as noted when a call was first seen. Out: words for reports.
"""

from __future__ import annotations

import linecache
import re
import sys
from collections.abc import Iterable
from pathlib import PurePath

_PLACE = re.compile(r"[^\s`:]+\.py(?=:\d)")


def shortened(places: Iterable[str]) -> str:
    """Lines of files, in short: `train.py:40-44, model.py:7`."""
    lines: dict[str, set[int]] = {}
    for place in places:
        path, _, line = place.rpartition(":")
        if path and line.isdigit():
            lines.setdefault(_cell(path) or PurePath(path).name, set()).add(int(line))
    shown = []
    for name, numbers in lines.items():
        low, high = min(numbers), max(numbers)
        shown.append(f"{name}:{low}" if low == high else f"{name}:{low}-{high}")
    return ", ".join(shown) or "autograd"


def code_at(place: str) -> str:
    """What stands on a line, and where, in short: "`loss.item()` at train.py:57"."""
    path, _, line = place.rpartition(":")
    code = linecache.getline(path, int(line)).strip() if line.isdigit() else ""
    return f"`{code}` at {shortened([place])}" if code else shortened([place])


def with_cells(text: str) -> str:
    """`text` with cells by their numbers for the files that a notebook makes of them."""
    return _PLACE.sub(lambda found: _cell(found[0]) or found[0], text)


def in_short(text: str) -> str:
    """`text` with files without their folders, and with cells by their numbers."""
    return _PLACE.sub(lambda found: _cell(found[0]) or PurePath(found[0]).name, text)


def _cell(path: str) -> str | None:
    """The name that IPython gives a cell, as `In[3]`; None for a file."""
    notebook = sys.modules.get("IPython")
    shell = notebook and notebook.get_ipython()
    named = shell and shell.compile.format_code_name(path)
    return named[1] if named else None
