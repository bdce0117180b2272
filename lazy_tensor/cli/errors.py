"""Ends of a command before its time: a line on stderr and an exit status, never a traceback."""

from __future__ import annotations

BAD_REQUEST = 2
INTERRUPTED = 130  # 128 + SIGINT, as shells report it
NOBODY_READS = 141  # 128 + SIGPIPE, likewise


class CommandError(Exception):
    """The user's request can't be met; the message says why and what to do."""
