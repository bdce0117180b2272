"""How a command ends early: a line on stderr and an exit status, never a traceback."""

from __future__ import annotations

BAD_REQUEST = 2
INTERRUPTED = 130  # 128 + SIGINT, as shells report it
NOBODY_READS = 141  # 128 + SIGPIPE, likewise


class CommandError(Exception):
    """The user asked for what can't be done here; the message says why and what to do."""
