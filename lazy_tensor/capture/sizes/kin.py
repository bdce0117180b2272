"""Calls of a function whose arguments differ in sizes alone, and the plans that run all of them.

In: the keys of such calls, and their takes. Out: captured calls of any size, as soon as takes of
`N_CALLS` sizes agree; the calls that settled on one size, and should have a plan of their own.
Made and called by `replay`.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import Any

from lazy_tensor.capture.captured_call import CapturedCall
from lazy_tensor.capture.outline import Outline
from lazy_tensor.capture.sizes.any_size import N_CALLS, AnySize
from lazy_tensor.capture.take import KEEPS_NUMBER, Take
from lazy_tensor.capture.watched_object import Obstacle
from lazy_tensor.kernels.cache import Cache

MOST_CAPTURED = 2
"""Captured calls of any size that are kept: the program may do the same in two ways."""
SETTLED_AFTER = 16
"""Replays of one size by a plan for any, before it gets one of its own, with fused kernels: that
costs two recorded calls, and kernels."""
MOST_SIZES = 256
"""Sizes whose replays are counted."""
MOST_WAITED = 1000
"""Bound on the calls recorded without a take after takes have failed."""


class Kin:
    """What is known of the calls of one kind. `captured` are tried in this order.

    `obstacle` says what keeps a plan from running calls of any size, "" if nothing does.
    """

    def __init__(self) -> None:
        self.captured: list[CapturedCall] = []
        self.obstacle = ""
        self._key: Any = None
        self._varies = False
        self._leaf_words: bytes | None = None
        self._outlines: deque[Outline] = deque(maxlen=N_CALLS - 1)
        self._n_calls = 0
        self._n_failed = self._wait = 0
        self._n_replays: Cache[Any, int] = Cache("", MOST_SIZES)

    def met(self, key: Any) -> None:
        """Note that a call with this key has to be recorded."""
        self._varies = self._varies or self._key not in (None, key)
        self._key = key
        self._n_calls += 1
        self._wait -= self._wait > 0

    def learns(self, warmup: int) -> bool:
        """Whether a call should be recorded with a take that notes sizes, though its own are new."""
        return self._varies and self._n_calls > warmup and not self._wait

    def learn(
        self,
        taken: Take | str,
        capture: Callable[[Take, Outline], CapturedCall],
        *,
        notes_sizes: bool,
    ) -> None:
        """Compare a take with those of other sizes, and `capture` the call if they agree. Only takes
        that note sizes are compared."""
        if not isinstance(taken, Take):
            if notes_sizes:
                self._fail(taken, is_final=taken == KEEPS_NUMBER)
            return
        outline, words = taken.outline, taken.outline.leaf_words
        self._varies = self._varies or self._leaf_words not in (None, words)
        self._leaf_words = words
        if not notes_sizes or any(one.any_size.confirm(outline) for one in self.captured):
            return
        if any(one.leaf_words == words for one in self._outlines):
            return
        outlines = [*self._outlines, outline]
        self._outlines.append(outline)
        if len(outlines) < N_CALLS:
            return
        try:
            any_size = AnySize(outlines)
            self.captured.insert(0, capture(any_size.of(taken), any_size.outlines[1]))
        except (Obstacle, RuntimeError) as reason:
            self._fail(str(reason))
        else:
            del self.captured[MOST_CAPTURED:]
            self.obstacle, self._n_failed = "", 0

    def _fail(self, obstacle: str, *, is_final: bool = False) -> None:
        self.obstacle = obstacle
        self._n_failed += 1
        self._wait = MOST_WAITED if is_final else min(2**self._n_failed - 2, MOST_WAITED)

    def settles(self, captured: CapturedCall) -> bool:
        """Note a replay by a plan for any size. Whether its sizes have come so often that they
        should have a plan of their own."""
        key = (id(captured), *captured.sizes)
        n = (self._n_replays.get(key) or 0) + 1
        self._n_replays.put(key, n)
        return n in (SETTLED_AFTER, SETTLED_AFTER + 1)
