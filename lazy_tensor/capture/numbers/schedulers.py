"""Schedulers of learning rates that a recorded call steps, which each replay then steps too.

In: the schedulers that a call can see, while it is recorded. Out: those that it stepped, and what
that changed in the optimizers' groups. Called by `take`.

A scheduler counts in Python, which a plan doesn't run. What it has counted decides nothing as long
as the code only calls `step()`: then the replay may call it when the plan has run.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from torch.optim.lr_scheduler import LRScheduler

from lazy_tensor.capture.watched_object import MISSING, is_same
from lazy_tensor.dispatch.run.tape import Tape
from lazy_tensor.dispatch.trie.trace import Trace
from lazy_tensor.dispatch.user_frame import user_line


class SchedulerSteps:
    """The schedulers that one call steps, in order: `stepped`.

    A step that a replay couldn't do when its plan has run is an obstacle: the tape stops.
    """

    def __init__(self, trace: Trace, tape: Tape) -> None:
        self.stepped: list[LRScheduler] = []
        self._trace = trace
        self._tape = tape
        self._is_inside = False
        # before the first step and after the last, by the dicts' ids and the keys
        self._before: dict[tuple[int, str], Any] = {}
        self._after: dict[tuple[int, str], Any] = {}

    def explains(self, group: Any, key: Any, old: Any, new: Any) -> bool:
        """Whether all that changed `old` to `new` in an optimizer's group were the steps."""
        place = (id(group), key)
        return (
            place in self._before
            and is_same(self._before[place], old)
            and is_same(self._after[place], new)
        )

    @contextmanager
    def followed(self, schedulers: list[LRScheduler]) -> Iterator[None]:
        """Note the steps of these schedulers, and whether their optimizers step afterwards."""
        own = [vars(scheduler).get("step", MISSING) for scheduler in schedulers]
        hooks = [
            scheduler.optimizer.register_step_pre_hook(self._before_optimizer)
            for scheduler in schedulers
        ]
        for scheduler in schedulers:
            vars(scheduler)["step"] = self._noting(scheduler, scheduler.step)
        try:
            yield
        finally:
            for scheduler, step in zip(schedulers, own, strict=True):
                del vars(scheduler)["step"]
                if step is not MISSING:
                    vars(scheduler)["step"] = step
            for hook in hooks:
                hook.remove()

    def _before_optimizer(self, *_: Any) -> None:
        if self.stepped and self._tape.numbers.is_noting:
            self._tape.stop(f"an optimizer steps at {user_line()}, behind its scheduler")

    def _noting(self, scheduler: LRScheduler, step: Callable[..., None]) -> Callable[..., None]:
        def noting(*args: Any, **kwargs: Any) -> None:
            # a scheduler may step others
            is_noted = self._tape.numbers.is_noting and not self._is_inside
            if is_noted and (args or kwargs):
                self._tape.stop(f"it gives a scheduler's step an argument at {user_line()}")
            if not is_noted or args or kwargs:
                step(*args, **kwargs)
                return
            state, groups = self._trace.state, scheduler.optimizer.param_groups
            before = [dict(group) for group in groups]
            self._is_inside = True
            try:
                step()
            finally:
                self._is_inside = False
            if self._trace.state is not state:
                self._tape.stop(f"a scheduler computes with tensors at {user_line()}")
            self.stepped.append(scheduler)
            for group, values in zip(groups, before, strict=True):
                for key, old in values.items():
                    if not is_same(old, group.get(key, MISSING)):
                        self._before.setdefault((id(group), key), old)
                        self._after[id(group), key] = group.get(key, MISSING)

        return noting
