"""The text of one nest: passes, the order of its loops, and where they are cut.

In: a `Nest`. Out: C++. Called by `write`. A pass over the inner dimensions computes what earlier
passes' reductions are needed for: a softmax is three passes over each row.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from itertools import pairwise

from lazy_tensor.kernels.backend import Declined
from lazy_tensor.kernels.loops.body import (
    Body,
    Kernel,
    Nest,
    NestText,
    Sink,
    Total,
    is_cheap,
    parts_of,
    stored_type,
)
from lazy_tensor.kernels.loops.values import Index, Indices, Reduced, Value, broadcast

MOST_LINES = 4000
"""The most lines of a loop's body in all its pieces; the compiler's time grows with them."""
FAR_APART = 8
"""The most elements between neighbours in the innermost loop, in arrays of `MANY` elements. A loop
that jumps further reads a whole cache line for each; Inductor moves tiles."""
MANY = 1 << 14
MOST_SCRATCH_BYTES = 256 << 10
"""The most memory on the stack that a thread keeps between passes."""
LEAST_PARALLEL = 1 << 15
"""The least elements of a nest that threads share: to start them takes some microseconds."""


class Loops(NestText):
    """Writes one nest.

    Each dimension has a variable. Once with all of them, to see how memory is read; then the order
    of the loops is chosen, and dimensions that lie one behind the other become one.
    """

    def __init__(self, kernel: Kernel, nest: Nest) -> None:
        super().__init__(kernel, nest)
        self._n_passes = 1
        self._n_passes += max(map(self._pass_of, nest.sinks))

    # which pass computes what

    def _pass_of(self, sink: Sink) -> int:
        if self._is_row_sink(sink):
            # behind the pass whose reductions it needs
            return max(self.level_of(sink.value) - 1, 0)
        level = self.level_of(sink.value, inside=True)
        # an input is stored when all of it has been read
        return max(level, self._n_passes - 1) if sink.is_input else level

    def _is_row_sink(self, sink: Sink) -> bool:
        """Whether it stores one element for each round of the outer loops."""
        if isinstance(sink.value, Reduced):
            return sink.memory is not None
        return sink.over != self.nest.size

    def _keep_between_passes(self) -> None:
        """Find the values that a pass computes and a later one needs."""
        seen: set[tuple[Value, int]] = set()
        left = [
            (s.value.base if isinstance(s.value, Reduced) else s.value, self._pass_of(s))
            for s in self.nest.sinks
            if not self._is_row_sink(s)
        ]
        while left:
            value, at = left.pop()
            if (value, at) in seen or isinstance(value, Reduced) or value in self.kernel.in_memory:
                continue
            seen.add((value, at))
            level = self.level_of(value)
            if level < at and value.size == self.nest.size and not is_cheap(value):
                self._keep(value)
                left.append((value, level))
            else:
                left += [(part, at) for part in parts_of(value)]
        n = math.prod(self.nest.size[self.kept :])
        if sum(n * value.dtype.itemsize for value in self.saved) > MOST_SCRATCH_BYTES:
            raise Declined("much is kept between passes")

    def _keep(self, value: Value) -> None:
        """Keep a value for later passes: as the result that it is, or in an array."""
        for sink in self.nest.sinks:
            if sink.value is value and sink.memory is not None and not sink.is_input:
                self.stored[value] = sink.memory
                return
        self.saved.setdefault(value, f"saved{len(self.saved)}")

    # the text

    def text(self) -> str:
        self._keep_between_passes()
        self._all_passes()
        self._arrange()
        if self.loops:
            self._check_strides(self.loops[-1][0])
        self.begin()
        return self._all_passes()

    def _all_passes(self) -> str:
        outer = [loop for loop in self.loops if self._is_outer(loop)]
        n = math.prod(self.nest.size[self.kept :])
        lines = [f"{stored_type(v.dtype)} {name}[{n}];" for v, name in self.saved.items()]
        self.scalars = {}
        for number in range(self._n_passes):
            lines += self._pass(number)
        body = self._looped(outer, lines)
        if self._is_shared and outer:
            body = f"#pragma omp parallel for num_threads({self.kernel.n_threads})\n{body}"
        return f"{{\n{body}\n}}"

    @property
    def _is_shared(self) -> bool:
        """Whether threads share the nest."""
        return self.kernel.n_threads > 1 and math.prod(self.nest.size) >= LEAST_PARALLEL

    def _looped(
        self, loops: Sequence[tuple[str, int]], lines: Sequence[str], parted: str = ""
    ) -> str:
        """The lines in loops; see `_for`."""
        text = "\n".join(lines)
        for variable, n in reversed(loops):
            hoisted = "\n".join(self.hoisted.get(variable, []))
            text = f"{_for(variable, 0, n, parted)} {{\n{hoisted}\n{text}\n}}"
        return text

    def _is_outer(self, loop: tuple[str, int]) -> bool:
        return int(loop[0][1:]) < self.kept

    def _pass(self, number: int) -> list[str]:
        """The lines of one pass: accumulators, loops, results of reductions, values of rows."""
        sinks = [sink for sink in self.nest.sinks if self._pass_of(sink) == number]
        reductions = [s.value for s in sinks if isinstance(s.value, Reduced) and s.memory is None]
        totals = {one: Total(one, self.name("total")) for one in reductions}
        stores = [s for s in sinks if not self._is_row_sink(s) and s.memory is not None]
        lines = [line for total in totals.values() for line in total.begin()]
        lines += self._inner_loops(number, stores, totals)
        for reduction, total in totals.items():
            self.scalars[reduction] = self.name("result")
            lines.append(total.end(self.scalars[reduction]))
        body = Body(self, number, None)
        for sink in sinks:
            if self._is_row_sink(sink):
                body.store(sink, self._index_of(sink.value))
        return lines + body.lines + body.stores

    def _inner_loops(
        self, number: int, stores: Sequence[Sink], totals: Mapping[Reduced, Total]
    ) -> list[str]:
        """The loops of a pass. The innermost one is cut into pieces where a roll wraps around."""
        saves = [v for v in self.saved if self.level_of(v) == number]
        if not (stores or saves or totals):
            return []
        inner = [loop for loop in self.loops if not self._is_outer(loop)]
        innermost, n = inner[-1] if inner else ("", 1)
        # threads share the outer loops if there are any
        is_shared = self._is_shared and bool(inner) and len(inner) == len(self.loops)
        parted = inner[0][0] if is_shared else ""
        clauses = "".join(clause for total in totals.values() for clause in total.clauses())
        lines: list[str] = []
        edges = self._edges(innermost, n)
        for low, high in pairwise(edges):
            body = Body(self, number, (innermost, low))
            for value in saves:
                body.save(value)
            for reduction, total in totals.items():
                body.lines += total.add(body.read(reduction.base, self._index_of(reduction.base)))
            for sink in stores:
                body.store(sink, self.index)
            if len(body.lines) * len(edges) > MOST_LINES:
                raise Declined("too many lines")
            if inner:
                lines += [f"#pragma omp simd{clauses}", _for(innermost, low, high, parted)]
            lines += ["{", *body.lines, *body.stores, "}"]
        loops = self._looped(inner[:-1], lines, parted)
        return self._among_threads(inner[0][1], loops, [*totals.values()]) if parted else [loops]

    def _among_threads(self, n: int, loops: str, totals: Sequence[Total]) -> list[str]:
        """The loops, of which each thread does a part of the first one, with `n` rounds. What
        threads have added up is added in their order, so that each run gives the same."""
        n_threads = self.kernel.n_threads
        parts = [line for total in totals for line in total.begin_parts(n_threads)]
        inside = [line for total in totals for line in total.begin()]
        kept = [line for total in totals for line in total.keep_part("thread")]
        added = [line for total in totals for line in total.add_part("thread")]
        every = _for("thread", 0, n_threads)
        return [
            *parts, f"#pragma omp parallel num_threads({n_threads})", "{",
            "const long thread = omp_get_thread_num(), n_threads = omp_get_num_threads();",
            f"const long from = {n}L * thread / n_threads, to = {n}L * (thread + 1) / n_threads;",
            *inside, loops, *kept, "}", *([f"{every} {{", *added, "}"] if added else []),
        ]  # fmt: skip

    def _edges(self, innermost: str, n: int) -> list[int]:
        """Where the pieces of the innermost loop begin, and where the last one ends."""
        cuts = {(shift - at) % size for name, at, shift, size in self.rolls if name == innermost}
        return sorted({0, n} | {cut for cut in cuts if cut < n})

    def _index_of(self, value: Value) -> Indices:
        """The index of a value that has the nest's sizes, or one element where the nest has
        more."""
        return broadcast(value.size)(self.index[: len(value.size)])

    # how the loops are arranged

    def _arrange(self) -> None:
        """Order the loops as the first result lies in memory, and join those that can be."""
        stores = [s for s in self.nest.sinks if s.memory is not None and s.over == self.nest.size]
        if self.nest.kept is None and stores:
            stride = stores[0].memory.stride if stores[0].memory else ()
            self.loops.sort(key=lambda loop: -stride[int(loop[0][1:])])
        joined: list[tuple[str, int]] = []
        index = {name: Index(((name, 1),)) for name, _ in self.loops}
        rolled = {name for name, *_ in self.rolls}
        for loop in self.loops:
            if joined and self._joins(joined[-1], loop, rolled):
                name, n = joined.pop()
                index[name] = Index()
                joined.append((loop[0], n * loop[1]))
            else:
                joined.append(loop)
        self.loops = joined
        self.index = tuple(
            index[f"i{d}"] if n != 1 else Index() for d, n in enumerate(self.nest.size)
        )

    def _joins(self, outer: tuple[str, int], inner: tuple[str, int], rolled: set[str]) -> bool:
        """Whether two loops can be one: each access goes on where the inner loop has ended."""
        if self._is_outer(outer) != self._is_outer(inner) or {outer[0], inner[0]} & rolled:
            return False
        factors = [dict(access.terms) for access in self.accesses]
        return all(one.get(outer[0], 0) == one.get(inner[0], 0) * inner[1] for one in factors)

    def _check_strides(self, innermost: str) -> None:
        if math.prod(self.nest.size) < MANY:
            return
        for access in self.accesses:
            if abs(dict(access.terms).get(innermost, 0)) > FAR_APART:
                raise Declined("neighbours lie far apart")


def _for(variable: str, low: int, high: int, parted: str = "") -> str:
    """The head of a loop. That of the variable `parted` is shared by threads: this one's part goes
    from `from` to `to`."""
    begin, end = str(low), str(high)
    if variable == parted:
        begin, end = f"larger({low}, from)", f"smaller({high}, to)"
    return f"for (long {variable} = {begin}; {variable} < {end}; {variable}++)"
