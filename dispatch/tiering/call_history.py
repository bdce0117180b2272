"""Which sequences of calls a program has made before: what stands in until the C++ is there that
knows (`native/past.h`). Without it nothing is recorded after a thread's first calls, but where all
must be.
"""

from __future__ import annotations


class Past:
    """The calls since the last sync point, none of which is known. The same methods as in C++."""

    __slots__ = ("_n",)

    def __init__(self) -> None:
        self._n = 0

    def clear(self) -> None:
        """Forget all."""
        self._n = 0

    def at_sync_point(self) -> bool:
        """Begin anew; whether all calls since the last sync point, if any, are known."""
        self._n = 0
        return False

    def note(self, call: int) -> bool:
        """Add a call, as a number that is the same wherever it comes; whether a loop's turn that
        was known has come round."""
        self._n += 1
        return False

    def is_known(self) -> bool:
        """Whether all calls up to the last one came in this order before."""
        return False

    def has_begun(self) -> bool:
        """Whether there were calls since the last sync point."""
        return self._n > 0

    def skip_turns(self, n: int) -> None:
        """Take so many turns of a loop for known, without a look at their calls."""

    def region(self) -> int:
        """The hash of all calls since the last sync point, in this order."""
        return 0

    def ends_turn(self) -> bool:
        """Whether the last call was the last of a loop's first ones that came again."""
        return False
