"""Tapes note what a trace doesn't hold of one call of a function, so that the call can be replayed.

In: ops that run at once, and flushes, while a tape is on a trace. Out: the random numbers drawn and
the values read, or an obstacle: the first thing that keeps the call from being one trace.
`lazy_tensor.replay` puts tapes on. Recording, `flush` and the patches report to them.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Iterable
from dataclasses import dataclass
from functools import partial
from types import CodeType, FrameType
from typing import Any

import torch

from lazy_tensor.dispatch import value_flow
from lazy_tensor.dispatch.metadata.infer import Meta, meta_of
from lazy_tensor.dispatch.ops.request import Request
from lazy_tensor.dispatch.run.aside import Aside
from lazy_tensor.dispatch.run.flush import flush
from lazy_tensor.dispatch.torch_private import below_autograd, generator_id, kernels_only, values_of
from lazy_tensor.dispatch.traced_number import NumberLog, may_be_traced
from lazy_tensor.dispatch.trie.trace import Trace, local
from lazy_tensor.dispatch.user_frame import calling_frame, user_line
from lazy_tensor.dispatch.wording import op_name


@dataclass(frozen=True, slots=True)
class Read:
    """A number that the call read, as `.item()` does, at the line `where`, behind `n_ops` ops.

    `aside` computes the tensor that it is in, from the leaves. Replays do so first: if the number
    differs, the call may take another branch, and is recorded again. `is_only_returned`: nothing is
    decided by it. `is_noted`: the call got a `TracedNumber`, which notes what it does with the
    number; `calls_ops` says whether it calls ops with it. With `is_list` the number is a list of
    them, as `.tolist()` gives. `text` shows it as it was read: the call may change the list.
    """

    n_ops: int
    slot: int
    number: Any
    text: str
    where: str
    aside: Aside
    is_only_returned: bool
    is_noted: bool
    calls_ops: bool
    is_list: bool

    def key(self, *, by_value: bool) -> tuple[Any, ...]:
        """Equal for reads at the same place; `by_value` only if they read the same number."""
        return (self.where, self.text if by_value else "", self.n_ops, self.slot)


MOST_READS = 64
"""Reads up to which a call can be replayed: each is computed by itself at every replay."""
MOST_COMPARED = 1024
"""Elements of a list that decides what a call does, as its text is compared at every replay."""


def number_in(data: torch.Tensor, *, is_list: bool) -> Any:
    """The number in a computed tensor, or the list of all, which no mode sees to be read."""
    if not is_list:
        with kernels_only():
            data = data.reshape(())
    return values_of(data)


class Draw:
    """An op that makes a tensor from none, usually of random numbers. Calling it draws new ones.

    An op that draws for a tensor (`normal_`) needs only the tensor's metadata `like`. It gets new
    memory of that layout, filled with zeros if `zeroed`. `item` picks one of several results.
    """

    def __init__(
        self,
        request: Request,
        *,
        like: torch.Tensor | None = None,
        zeroed: bool = False,
        item: int | None = None,
    ) -> None:
        self.op = request.op
        self.like: Meta | None = None if like is None else meta_of(like)
        self.args = request.args if like is None else request.args[1:]
        self.kwargs = request.kwargs
        self.zeroed = zeroed
        self.item = item

    def __call__(self) -> torch.Tensor:
        with below_autograd():
            if self.like is None:
                result = self.op(*self.args, **self.kwargs)
            else:
                size, stride, _, dtype, device = self.like
                blank = torch.empty_strided(size, stride, dtype=dtype, device=device)
                if self.zeroed:
                    blank.zero_()
                result = self.op(blank, *self.args, **self.kwargs)
        drawn: torch.Tensor = result if self.item is None else result[self.item]
        return drawn

    @property
    def key(self) -> tuple[Any, ...]:
        """Equal for equal draws. Numbers count by `repr`, because 0.0 == -0.0 and 1 == True."""
        given = [*enumerate(self.args), *self.kwargs.items()]
        numbers = repr([(k, v) for k, v in given if not isinstance(v, torch.Generator)])
        return (self.op, self.like, numbers, generator_id(self.generator), self.zeroed, self.item)

    @property
    def generator(self) -> torch.Generator:
        """The generator that its numbers come from: the one given, or the device's default."""
        given = self.kwargs.get("generator")
        if given is None:
            found = [a for a in self.args if isinstance(a, torch.Generator)]
            device = self.like[4] if self.like is not None else self.kwargs.get("device")
            given = found[0] if found else _default_generator(torch.device(device or "cpu"))
        generator: torch.Generator = given
        return generator


def _default_generator(device: torch.device) -> torch.Generator:
    if device.type != "cuda":
        return torch.default_generator
    index = torch.cuda.current_device() if device.index is None else device.index
    return torch.cuda.default_generators[index]


def drawn(trace: Trace, draw: Draw) -> torch.Tensor:
    """Draw, and note the draw if a tape is on the trace."""
    tape = trace.tape
    return draw() if tape is None else tape.drawn(draw)


def stop_tape(why: str) -> None:
    """Take the tape off this thread's trace, if one is on. `why` says what can't be replayed."""
    if local.trace.tape is not None:
        local.trace.tape.stop(f"{why} at {user_line()}")


class _Watched:
    """Stands for torch's default generator while a tape is on, and stops the tape at a new seed.

    Comparing states would miss a seed that leaves the generator as it is. Seeds that other threads
    set don't count here.
    """

    def __init__(self, tape: Tape) -> None:
        self._tape = tape
        self._thread = threading.get_ident()

    def __getattr__(self, name: str) -> Any:
        is_own = threading.get_ident() == self._thread
        if is_own and name in ("manual_seed", "seed", "set_state"):
            self._tape.stop(f"the state of a random generator is set at {user_line()}")
        return getattr(torch.default_generator, name)


class Tape:
    """Notes what one call does besides recording ops, from an empty trace on.

    `generators` are those besides torch's own that the call may draw from. `caller` is the code of
    the function that makes the call. `obstacle` says why the call can't be replayed; with it the
    tape is off the trace. `draws` are the draws with their results, `reads` the numbers read.
    `numbers` notes what the call does with them.
    """

    def __init__(
        self,
        trace: Trace,
        generators: Iterable[torch.Generator] = (),
        caller: CodeType | None = None,
    ) -> None:
        self.obstacle: str | None = None
        self.draws: list[tuple[Draw, torch.Tensor]] = []
        self.reads: list[Read] = []
        # The log asks only while the tape runs. A cycle would keep all that was drawn.
        self.numbers = NumberLog(partial(Tape._calls_ops, weakref.proxy(self)))
        self.kept: frozenset[str] = frozenset()
        """Names under which numbers are kept for the next call."""
        self.of_users: frozenset[str] = frozenset()
        """Names of the user's functions and attributes, which are no ops of torch's."""
        self._trace = trace
        self._caller = caller
        known = (torch.default_generator, *torch.cuda.default_generators, *generators)
        # Each generator's state after its last noted draw. If a state differs at the next draw or
        # at the end, somebody set a seed, or drew past the tape.
        self._states = {generator_id(g): (g, g.get_state()) for g in known}
        self._calls_left = trace.policy.calls_left
        trace.policy.cold = 0
        # Calls on a tape have a root of their own: there ops are recorded that else run at once.
        try:
            trace.tape = self
            while not trace.restart():
                trace.tape = None
                flush(trace, "replay", quiet=True)
                trace.tape = self
        except BaseException:  # the flush failed, or was interrupted
            trace.tape = None
            raise
        torch.random.default_generator = _Watched(self)  # type: ignore[assignment, attr-defined]

    def stop(self, obstacle: str) -> None:
        """Take the tape off, for the first `obstacle`: the call needs more than its trace."""
        if self.obstacle is None:
            self.obstacle = obstacle
        self.take_off()

    def take_off(self) -> None:
        """Let the trace go on without the tape; check that nobody drew past it or set a seed."""
        if self._trace.tape is not self:
            return
        self._trace.tape = None
        self.numbers.is_open = False
        torch.random.default_generator = torch.default_generator  # type: ignore[attr-defined]
        # a tape records all, so its calls say nothing about what repeats in the program
        self._trace.policy.calls_left = self._calls_left
        generators = [generator for generator, _ in self._states.values()]
        if self.obstacle is None and not all(map(self._is_untouched, generators)):
            self.obstacle = "the state of a random generator is set inside"

    def inference_mode_changes(self) -> None:
        """Note it in the trace: a state stands for calls in one mode alone. A result's wrapper says
        whether it is an inference tensor, so the plan may run without the mode."""
        trace = self._trace
        if not trace.busy and trace.state is not trace.root:
            trace.mark(("inference mode changes",))

    def drawn(self, draw: Draw) -> torch.Tensor:
        """Draw and note it, unless the generator can't be followed: that is an obstacle."""
        generator = draw.generator
        if generator_id(generator) not in self._states:
            self.stop(f"a generator that the call makes itself is drawn from at {user_line()}")
            return draw()
        if not self._is_untouched(generator):
            self.stop(f"the state of a random generator is set before {user_line()}")
            return draw()
        result = draw()
        self._states[generator_id(generator)] = (generator, generator.get_state())
        self.draws.append((draw, result))
        return result

    def item(self, slot: int) -> Any:
        """The number in a slot for `.item()`, traced if its bytecode allows that; None if it can't
        be read aside."""
        read = self.read(slot, may_be_noted=True)
        if read is None or not read.is_noted:
            return None if read is None else read.number
        text = f"r[{len(self.reads) - 1}]"
        return self.numbers.traced(text, read.number, calls_ops=read.calls_ops)

    def read(self, slot: int, *, is_list: bool = False, may_be_noted: bool = False) -> Read | None:
        """Compute a slot's value aside, and note the read. None if that isn't possible."""
        trace, aside = self._trace, Aside(self._trace.state, slot)
        if aside.communicates or len(self.reads) >= MOST_READS:
            return None
        was_busy, trace.busy = trace.busy, True  # reads of memory aside flush nothing
        try:
            (data,) = aside(trace.leaves, trace.scalars)
        except Exception:  # the flush without a tape raises it, as in any block
            self.stop(f"an op raises when a value is read at {user_line()}")
            return None
        finally:
            trace.busy = was_busy
        number = number_in(data, is_list=is_list)
        may_be_noted = may_be_noted and type(number) in (float, int)
        frame = calling_frame()
        calls_ops = self._calls_ops(frame, is_read=True) if may_be_noted else None
        is_noted = may_be_traced(number, calls_ops)
        is_only_returned = not is_noted and value_flow.is_only_returned(frame, self._caller)
        if data.numel() > MOST_COMPARED and not (is_noted or is_only_returned):
            return None
        read = Read(
            trace.state.n_ops, slot, number, repr(number), user_line(), aside, is_only_returned,
            is_noted, bool(calls_ops), is_list,
        )  # fmt: skip
        self.reads.append(read)
        return self.reads[-1]

    def _calls_ops(self, frame: FrameType | None, *, is_read: bool = False) -> bool | None:
        """See `value_flow.calls_ops`."""
        return value_flow.calls_ops(
            frame, self._caller, is_read=is_read, kept=self.kept, of_users=self.of_users
        )

    def ran_at_once(self, request: Request, reason: str) -> None:
        """Stop the tape, because an op runs at once and so is no part of the trace.

        Marks for profilers may be left out of a replay, and stop nothing.
        """
        if request.op.namespace != "profiler":
            self.stop(f"{op_name(request.op)} at {user_line()} runs at once ({reason})")

    def _is_untouched(self, generator: torch.Generator) -> bool:
        with kernels_only():
            return torch.equal(generator.get_state(), self._states[generator_id(generator)][1])
