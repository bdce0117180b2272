"""All that follows Python's numbers while a call is recorded, put on together.

In: a tape, and the picture of what the call can see. Out: `FollowedNumbers`. Called by `take`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from lazy_tensor.capture.numbers.kept_numbers import KeptNumbers
from lazy_tensor.capture.numbers.schedulers import SchedulerSteps
from lazy_tensor.capture.numbers.step_counts import StepCounts
from lazy_tensor.capture.object_graph import ObjectGraph
from lazy_tensor.dispatch import torch_private
from lazy_tensor.dispatch.run.tape import Tape
from lazy_tensor.dispatch.traced_number import math_of_numbers
from lazy_tensor.dispatch.trie.trace import Trace


class FollowedNumbers:
    """The step counts and rates of optimizers, the steps of schedulers, and numbers that the call
    finds under one of the names `moved`, or keeps for the next call."""

    def __init__(
        self,
        trace: Trace,
        tape: Tape,
        function: Callable[..., Any],
        graph: ObjectGraph,
        moved: frozenset[str],
    ) -> None:
        self._graph = graph
        self.counts = StepCounts(trace, tape)
        self.schedulers = SchedulerSteps(trace, tape)
        self.kept = KeptNumbers(graph, function, tape, moved)

    @contextmanager
    def lent(self) -> Iterator[None]:
        """Context manager: a call inside gets traced numbers and step counts."""
        with (
            torch_private.step_counts_read_by(self.counts.read),
            self.counts.lent_in_groups(self._graph),
            self.schedulers.followed(self._graph.schedulers),
            math_of_numbers(),
            self.kept.lent(self._graph),
        ):
            yield
