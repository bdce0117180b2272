"""Numbers that ops get, computed anew at each replay from what the call reads, finds or is given.

In: the numbers that two calls gave to ops, each with the text that tells how Python computed it
(see `traced_number`). Out: `OpNumbers`, which compute a trace's numbers for a later call. Called by
`outline` and `captured_call`.

A number that an op got is matched with the text that gave the same value, in both of two calls.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from typing import Any, NamedTuple

import torch

from lazy_tensor.capture.watched_object import Obstacle, is_same
from lazy_tensor.dispatch import torch_private
from lazy_tensor.dispatch.traced_number import Check, computes, counts_in, is_plain, reads_in

FORMS = ("%s", "(-%s)", "(1 - %s)", "(%s - 1)", "(1 / %s)")
"""What ops, and their gradients, compute from a number before other ops get it."""


def explained_by(*given: dict[str, Any]) -> dict[tuple[str, ...], list[str]]:
    """Texts by their values in some calls, as text: of the numbers `given` to ops in each of these.
    The simplest form counts that gives a value."""
    found: dict[tuple[str, ...], list[str]] = {}
    for form in FORMS:
        of_form: dict[tuple[str, ...], list[str]] = defaultdict(list)
        compute = computes(form % "r[0]")
        for text in given[0]:
            with suppress(KeyError, ArithmeticError):
                values = [compute({0: of_call[text]}) for of_call in given]
                of_form[tuple(map(repr, values))].append(form % text)
        found = of_form | found
    return found


class Step(NamedTuple):
    """A number to compute: those of the trace at `places`, or one that must stay as it `was`."""

    places: list[int]
    was: Any
    compute: list[Callable[..., Any]]


class OpNumbers:
    """Computes those numbers of a trace that changed between some calls.

    `given` are the numbers that the calls gave to ops, `scalars` those of their traces, the latest
    call's first. `constants` are the small tensors that the call makes. Numbers that were the same
    in all calls must stay the same. Of optimizers' numbers the `unmoved` do so anyway. `texts` are
    all that a replay has to compute. RuntimeError if a constant may be made from a number that
    changes.
    """

    def __init__(
        self,
        given: Sequence[dict[str, Any]],
        scalars: Sequence[Sequence[complex]],
        constants: Iterable[torch.Tensor],
        unmoved: set[int],
    ) -> None:
        now, *before = given
        explained = explained_by(*given)
        self.texts: list[str] = []
        self._steps: dict[int, list[Step]] = defaultdict(list)
        self._computed_by: dict[int, list[str]] = {}
        changing = []
        for text, value in now.items():
            if any(text in one and not is_same(value, one[text]) for one in before):
                changing.append(value)
            elif reads_in(text) or not counts_in(text) <= unmoved:
                self._add([], value, [text])
        places: dict[tuple[str, ...], list[int]] = defaultdict(list)
        for place, numbers in enumerate(zip(*scalars, strict=True)):
            values = tuple(map(repr, numbers))
            if len({*values}) > 1 and values in explained:
                self._computed_by[place] = explained[values]
                places[values].append(place)
        for values, alike in places.items():
            self._add(alike, None, explained[values])
        if any(may_be_made_from(changing, constant) for constant in constants):
            raise RuntimeError("a tensor may be made from a number that changes")

    def _add(self, places: list[int], was: Any, texts: list[str]) -> None:
        """Note a number to compute by these texts, behind the last read that they need."""
        last = max([-1, *(i for text in texts for i in reads_in(text))])
        self._steps[last].append(Step(places, was, [computes(text) for text in texts]))
        self.texts += texts

    def covers(self, check: Check) -> bool:
        """Whether what a check may raise is raised, too, where the numbers are computed."""
        # that a number isn't 0 is checked by the text (1 / number)
        part = check.text.removeprefix("(1")
        return check.outcome is None and any(part in text for text in self.texts)

    def computed_by(self, place: int) -> list[str]:
        """The texts that compute the number of the trace at a place; none if it never changes."""
        return self._computed_by.get(place, [])

    def __bool__(self) -> bool:
        return bool(self.texts)

    @property
    def needs_reads(self) -> bool:
        """Whether some are computed from numbers that the call reads."""
        return any(last >= 0 for last in self._steps)

    def put(
        self, scalars: list[complex], numbers: dict[int, float], counts: list[Any], last: int
    ) -> None:
        """Put the numbers that need reads up to the one numbered `last` among the trace's; Obstacle
        if the call might do something else. `numbers` and `counts` are those of the texts."""
        for places, was, compute in self._steps.get(last, ()):
            # which text computes it is unknown as long as they agree, so they have to
            first, *others = [one(numbers, counts) for one in compute]
            if not (is_plain(first) and all(is_same(first, one) for one in others)):
                raise Obstacle("a number that ops get is computed another way")
            if not places and not is_same(first, was):
                raise Obstacle("a number that ops get is another one")
            for place in places:
                scalars[place] = first


def may_be_made_from(numbers: list[float], constant: torch.Tensor) -> bool:
    """Whether a tensor has one of the numbers, rounded to its dtype, as an element."""
    if not constant.is_floating_point():
        return False
    with torch_private.kernels_only():
        rounded = torch.tensor(numbers, dtype=torch.float64).to(constant.dtype)
        return bool(torch.isin(rounded.double(), constant.double()).any())
