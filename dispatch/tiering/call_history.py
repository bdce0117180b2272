"""Which sequences of calls a program has made before: a stand-in until the C++ is loaded.

The C++ (`native/past.h`) keeps a hash of each sequence of calls since a sync point. This class has
the same methods and knows no sequence. So without the C++ nothing is recorded after a thread's
first calls (`policy.FIRST_CALLS`), except where all must be, as by `record="always"`. Used by
`policy` and `record.sync_points`.
"""

from __future__ import annotations


class Past:
    """The calls since the last sync point, none of which is known. Its methods are those of C++."""

    __slots__ = ("_n",)

    def __init__(self) -> None:
        self._n = 0

    def clear(self) -> None:
        """Forget all sequences."""
        self._n = 0

    def at_sync_point(self) -> bool:
        """Begin a region; whether the last one had calls, and all of them came before in this
        order."""
        self._n = 0
        return False

    def note(self, call: int) -> bool:
        """Add a call; whether it ends a turn of a loop that is known.

        The call is a number, which calls of the same op on tensors of the same sizes and dtypes
        share. So a region has one hash, whether it is recorded or runs as in eager.
        """
        self._n += 1
        return False

    def is_known(self) -> bool:
        """Whether all calls since the last sync point, the last one too, came in this order
        before."""
        return False

    def has_begun(self) -> bool:
        """Whether there were calls since the last sync point."""
        return self._n > 0

    def skip_turns(self, n: int) -> None:
        """Don't look at the calls of the next `n` turns of a loop: take them for known."""

    def region(self) -> int:
        """The hash of all calls since the last sync point, in this order."""
        return 0

    def ends_turn(self) -> bool:
        """Whether the last call ended a turn of a loop: the loop's first calls have come again."""
        return False
