"""Places in a program as reports show them: short names of files, and numbers of notebook cells.

In: `path:line`, as noted when a call was first seen. Out: text for reports.
"""

from __future__ import annotations

import linecache
import re
import sys
from collections.abc import Iterable
from pathlib import PurePath

# a path in front of a line number; IPython keeps cells in files like `/tmp/ipykernel_1/123.py`
_PLACE = re.compile(r"[^\s`:]+\.py(?=:\d)")


def shortened(places: Iterable[str]) -> str:
    """Places without folders, a range of lines for each file: `train.py:40-44, model.py:7`."""
    lines: dict[str, set[int]] = {}
    for place in places:
        path, _, line = place.rpartition(":")
        if path and line.isdigit():
            lines.setdefault(_cell(path) or PurePath(path).name, set()).add(int(line))
    shown = []
    for name, numbers in lines.items():
        low, high = min(numbers), max(numbers)
        shown.append(f"{name}:{low}" if low == high else f"{name}:{low}-{high}")
    # `user_line` gives "?" on autograd's own threads
    return ", ".join(shown) or "autograd"


def code_at(place: str) -> str:
    """The code on a line, and its place: "`loss.item()` at train.py:57"."""
    path, _, line = place.rpartition(":")
    code = linecache.getline(path, int(line)).strip() if line.isdigit() else ""
    return f"`{code}` at {shortened([place])}" if code else shortened([place])


def with_cells(text: str) -> str:
    """`text` with numbers of notebook cells in place of the files that IPython makes of them."""
    return _PLACE.sub(lambda found: _cell(found[0]) or found[0], text)


def in_short(text: str) -> str:
    """`text` with files without their folders, and numbers of notebook cells."""
    return _PLACE.sub(lambda found: _cell(found[0]) or PurePath(found[0]).name, text)


def _cell(path: str) -> str | None:
    """The name of a notebook's cell, as "In[3]"; None for a file."""
    notebook = sys.modules.get("IPython")
    shell = notebook and notebook.get_ipython()
    named = shell and shell.compile.format_code_name(path)
    return named[1] if named else None
