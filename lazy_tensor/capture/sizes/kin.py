"""Calls of a function whose arguments differ in sizes alone, and the plans that run all of them.

In: the keys of such calls, and their takes. Out: captured calls of any size, as soon as takes of
`N_CALLS` sizes agree.
Made and called by `replay`.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import Any

from lazy_tensor.capture.arguments import Arguments
from lazy_tensor.capture.captured_call import CapturedCall, Look
from lazy_tensor.capture.outline import Outline
from lazy_tensor.capture.sizes.any_size import N_CALLS, AnySize
from lazy_tensor.capture.sizes.merged_steps import fingerprint
from lazy_tensor.capture.take import KEEPS_NUMBER, Take
from lazy_tensor.capture.watched_object import Obstacle

MOST_CAPTURED = 4
"""Captured calls that are kept: of any size in several ways, or for several objects."""
MOST_MOVES = 3
"""Calls with the same objects at which a captured call is tried to be moved to them: that looks at
all that the call can see."""
MOST_LOST = 2
"""Takes that may fail for arguments of the same sizes, as those of a prompt that fills a cache."""
MOST_OUTLINES = 8
"""Outlines that are kept to compare with: a program may do one thing or another by turns."""
MOST_WAITED = 1000
"""Bound on the calls recorded without a take after takes have failed."""


class Kin:
    """What is known of the calls of one kind. `captured` are those of any size, to be tried in this
    order.

    `obstacle` says what keeps a plan from running calls of any size, "" if nothing does. Without
    `any_size` none is looked for.
    """

    def __init__(self, *, any_size: bool) -> None:
        self._any_size = any_size
        self.captured: list[CapturedCall] = []
        self._movable: list[CapturedCall] = []  # those with objects among their arguments
        self.obstacle = ""
        self._words: Any = None  # of the last call's arguments
        self._varies = False
        self._leaf_words: bytes | None = None
        self._outlines: deque[tuple[int, Outline]] = deque(maxlen=MOST_OUTLINES)
        self._n_calls = 0
        self._tried: list[tuple[str, Any]] = []  # objects that a call was to be moved to last
        self._n_tried = 0  # how often
        self._n_lost: dict[tuple[int, ...], int] = {}  # takes that failed, by sizes of arguments
        self._n_failed = self._wait = 0

    def of(self, arguments: Arguments) -> list[CapturedCall]:
        """The captured calls for the objects among these arguments."""
        ids = _ids(arguments.objects)
        return [one for one in self.captured if _ids(one.objects) == ids]

    def move(self, arguments: Arguments, look: Look) -> CapturedCall | None:
        """A captured call for the objects among these arguments, made of one for others that hold
        the same."""
        ids, sizes = _ids(arguments.objects), arguments.sizes
        known = [
            one for one in self._movable
            if one.outline.may_have(sizes) and _ids(one.objects) != ids
            and (one.any_size is not None or one.argument_words == arguments.key[1])
        ]  # fmt: skip
        if not (ids and known):
            return None
        if _ids(self._tried) != ids:
            self._tried, self._n_tried = arguments.objects, 0
        if self._n_tried == MOST_MOVES:
            return None
        self._n_tried += 1
        for captured in known:
            try:
                moved = captured.moved_to(arguments, look)
            except Exception as reason:  # what can't be looked at is recorded, and may raise there
                self.obstacle = str(reason)
            else:
                self._movable.remove(captured)
                self.keep(moved)
                return moved
        return None

    def keep(self, captured: CapturedCall) -> None:
        """Keep a captured call: to move it to other objects, and to run it if it is of any size."""
        kept = [self._movable] if captured.objects and self._any_size else []
        kept += [self.captured] if captured.any_size is not None else []
        for calls in kept:
            calls.insert(0, captured)
            del calls[MOST_CAPTURED:]

    def drop(self, captured: CapturedCall) -> None:
        """Forget a captured call that did something else, wherever it was moved to."""
        for calls in (self.captured, self._movable):
            calls[:] = [one for one in calls if one.plan is not captured.plan]

    def met(self, words: Any) -> None:
        """Note that a call has to be recorded, whose arguments these words describe."""
        self._varies = self._varies or self._words not in (None, words)
        self._words = words
        self._n_calls += 1
        self._wait -= self._wait > 0

    def learns(self, warmup: int, arguments: Arguments) -> bool:
        """Whether a call should be recorded with a take that notes sizes."""
        if self._n_lost.get(arguments.sizes, 0) >= MOST_LOST:
            return False
        return self._any_size and self._varies and self._n_calls > warmup and not self._wait

    def learn(
        self,
        taken: Take | str,
        arguments: Arguments,
        capture: Callable[[Take, Outline], CapturedCall],
        *,
        notes_sizes: bool,
    ) -> CapturedCall | None:
        """Compare a take with those of other sizes; `capture` the call if they agree. A take that
        notes no sizes only tells whether these vary.

        Returns the captured call that does the same, if that was known before.
        """
        if not isinstance(taken, Take):
            if notes_sizes:
                self._fail(taken, is_final=taken == KEEPS_NUMBER)
                self._n_lost[arguments.sizes] = self._n_lost.get(arguments.sizes, 0) + 1
            return None
        outline, words = taken.outline, taken.outline.leaf_words
        self._varies = self._varies or self._leaf_words not in (None, words)
        self._leaf_words = words
        if not notes_sizes:
            return None
        for captured in self.of(arguments):
            if captured.any_size is not None and captured.any_size.confirm(outline):
                self._n_failed = 0
                return captured
        kind = fingerprint(outline)
        alike = [one for its_kind, one in self._outlines if its_kind == kind]
        if any(one.leaf_words == words for one in alike):
            if self.captured:
                self._fail("calls of this size do something else")
            return None
        self._outlines.append((kind, outline))
        if len(alike) < N_CALLS - 1:
            return None
        # more calls tell more, but one of them may be of another kind
        for n in dict.fromkeys((N_CALLS, len(alike) + 1)):
            try:
                any_size = AnySize([*alike[1 - n :], outline])
                captured = capture(any_size.of(taken), any_size.outlines[1])
            except (Obstacle, RuntimeError) as reason:
                obstacle = str(reason)
            else:
                self.keep(captured)
                self.obstacle, self._n_failed = "", 0
                return None
        self._fail(obstacle)
        return None

    def _fail(self, obstacle: str, *, is_final: bool = False) -> None:
        self.obstacle = obstacle
        self._n_failed += 1
        self._wait = MOST_WAITED if is_final else min(2**self._n_failed - 2, MOST_WAITED)


def _ids(objects: list[tuple[str, Any]]) -> tuple[int, ...]:
    return tuple([id(one) for _, one in objects])
