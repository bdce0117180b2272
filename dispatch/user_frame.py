"""Finds the user's file and line: the innermost frame that is neither torch's nor this package's.

Called where a state of the trie is made, where a trace is flushed, and by warnings. Hits don't pay
for it.
"""

from __future__ import annotations

import sys
import warnings
from functools import cache
from types import FrameType


@cache
def is_users(module: str) -> bool:
    """Whether a module is the user's. This package's commands and examples count as such."""
    if module.startswith("lazy_tensor."):
        return module.startswith(("lazy_tensor.cli", "lazy_tensor.examples"))
    return not (module.startswith("torch.") or module in ("torch", "lazy_tensor", "contextlib"))


def user_line() -> str:
    """`file.py:line` of the user's call that led here; "?" on autograd's own threads."""
    frame = sys._getframe(1)
    while frame is not None:
        if is_users(frame.f_globals.get("__name__", "")):
            return f"{frame.f_code.co_filename}:{frame.f_lineno}"
        frame = frame.f_back  # type: ignore[assignment]
    return "?"


def calling_frame() -> FrameType | None:
    """The frame, of the user's code or of torch's, that called this package."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None and _is_own(frame.f_globals.get("__name__", "")):
        frame = frame.f_back
    return frame


@cache
def _is_own(module: str) -> bool:
    return module.partition(".")[0] == "lazy_tensor" and not is_users(module)


def calling_module() -> str:
    """The name of the module, torch's or the user's, that called this package."""
    frame = calling_frame()
    return "" if frame is None else str(frame.f_globals.get("__name__", ""))


def warn_user(text: str) -> None:
    """Warn at the user's line, whatever frames of torch and this package lie between."""
    path, _, line = user_line().rpartition(":")
    warnings.warn_explicit(text, UserWarning, path or "?", int(line) if path else 0)
