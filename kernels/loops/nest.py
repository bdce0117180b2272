"""The text of one nest: passes, the order of its loops, and where they are cut.

In: a `Nest`. Out: C++. Called by `write`. A pass over the inner dimensions computes what earlier
passes' reductions are needed for: a softmax is three passes over each row. Reductions over rows
have accumulators in variables. Those over columns, whose elements lie apart in memory, have one for
each column.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import pairwise

from lazy_tensor.kernels.backend import Declined
from lazy_tensor.kernels.loops.body import Body, Kernel, Nest, NestText, Sink, Total, stored_type
from lazy_tensor.kernels.loops.index import Index, Indices, NeedsSplit, Variable, long_of
from lazy_tensor.kernels.loops.values import C_TYPES, Computed, Reduced, Value, is_cheap, parts_of

MOST_LINES = 4000
"""The most lines of a loop's body in all its pieces; the compiler's time grows with them."""
MOST_ROUNDS = 8
"""The most times that a text is written again because it has more pieces."""
FAR_APART = 8
"""The most elements between neighbours in the innermost loop, in arrays of `MANY` elements. A loop
that jumps further reads a whole cache line for each; Inductor moves tiles."""
MANY = 1 << 14
MOST_SCRATCH_BYTES = 256 << 10
"""The most memory on the stack that a thread keeps between passes."""
LEAST_INNER = 16
"""In large arrays with functions, the least elements of a row that is reduced by itself: what
doesn't fill a vector is computed one by one. Of shorter rows the first elements of many rows are
reduced together, then the second ones: a softmax of 100,000 rows of 8 takes a third of the time."""
MOST_LANES = 64
"""The most rounds of the loop that `_find_lanes` makes the innermost, if its size has such a
divisor."""
LEAST_COLUMNS = 8
"""The least columns that have an accumulator each: fewer are reduced one by one."""
LEAST_PARALLEL = 1 << 15
"""The least elements of a nest that threads share: to start them takes some microseconds."""


class Loops(NestText):
    """Writes one nest.

    Each dimension has a variable. Once with all of them, to see how memory is read; then the order
    of the loops is chosen, and dimensions that lie one behind the other become one.
    """

    def __init__(self, kernel: Kernel, nest: Nest) -> None:
        super().__init__(kernel, nest)
        # variables of the inner loops that make up columns
        self._columns: list[Variable] = []
        # the variable of the innermost loop if that isn't the one that steps over least memory
        self._lanes: Variable | None = None
        self._n_splits = 0
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
        return sink.over != self.nest.over

    def _index_of(self, sink: Sink) -> Indices:
        return self.row(sink.value) if self._is_row_sink(sink) else self.full

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
            if level < at and value.size == self.nest.over and not is_cheap(value):
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
        self.writes = [
            (sink.memory.name, sink.memory.at(self._index_of(sink)), self._pass_of(sink))
            for sink in self.nest.sinks
            if sink.memory is not None and sink.is_input
        ]
        try:
            self._all_passes()
            self._arrange()
        except NeedsSplit as split:
            self._split(split.variable, split.n)
            return self.text()
        # where a roll wraps around in one piece, others may begin
        for _ in range(MOST_ROUNDS):
            n_rolls = len(self.rolls)
            self.begin()
            found = self._all_passes()
            if len(self.rolls) == n_rolls:
                return found
        raise Declined("rolls of rolls")

    def _split(self, variable: Variable, n: int) -> None:
        """Make two loops of one."""
        place = self.loops.index(variable)
        self._n_splits += 1
        self.loops[place : place + 1] = [
            Variable(f"i{variable.dim}of{self._n_splits}", variable.n // n, variable.dim),
            replace(variable, n=n),
        ]
        self.index = self._index()
        self.rolls.clear()
        self.begin()

    def _all_passes(self) -> str:
        n = math.prod(self.nest.size[self.kept :])
        lines = [f"{stored_type(v.dtype)} {name}[{n}];" for v, name in self.saved.items()]
        self.results = {}
        for number in range(self._n_passes):
            lines += self._pass(number)
        outer = [loop for loop in self.loops if self._is_outer(loop)]
        n_threads = self.kernel.n_threads
        if self._columns and self._parted:
            begin = [f"#pragma omp parallel num_threads({n_threads})", "{"]
            lines = [*begin, *_share_of(self._columns[0].n), *lines, "}"]
        body = self._looped(outer, lines)
        if self._is_shared and outer:
            body = f"#pragma omp parallel for num_threads({n_threads})\n{body}"
        return f"{{\n{body}\n}}"

    @property
    def _is_shared(self) -> bool:
        """Whether threads share the nest."""
        return self.kernel.n_threads > 1 and math.prod(self.nest.size) >= LEAST_PARALLEL

    @property
    def _parted(self) -> str:
        """The variable of the inner loop that threads share; "" if they share outer loops."""
        inner = [loop for loop in self.loops if not self._is_outer(loop)]
        if not self._is_shared or not inner or len(inner) < len(self.loops):
            return ""
        return self._columns[0].name if self._columns else inner[0].name

    def _looped(self, loops: Sequence[Variable], lines: Sequence[str]) -> str:
        """The lines in loops."""
        text = "\n".join(lines)
        for variable in reversed(loops):
            hoisted = "\n".join(self.hoisted.get(variable.name, []))
            text = f"{self._for(variable, 0, variable.n)} {{\n{hoisted}\n{text}\n}}"
        return text

    def _for(self, variable: Variable, low: int, high: int) -> str:
        """The head of a loop."""
        return _for(variable.name, low, high, is_parted=variable.name == self._parted)

    def _is_outer(self, loop: Variable) -> bool:
        return loop.dim < self.kept and loop not in self._columns

    def _pass(self, number: int) -> list[str]:
        """The lines of one pass: accumulators, loops, results of reductions, values of rows."""
        sinks = [sink for sink in self.nest.sinks if self._pass_of(sink) == number]
        reductions = [s.value for s in sinks if isinstance(s.value, Reduced) and s.memory is None]
        totals = {one: Total(one, self.name("total"), *self._cells) for one in reductions}
        stores = [s for s in sinks if not self._is_row_sink(s) and s.memory is not None]
        lines = [line for total in totals.values() for line in total.declared()]
        lines += self._over_columns([line for t in totals.values() for line in t.begin()])
        lines += self._inner_loops(number, stores, totals)
        ends = [total.end() for total in totals.values()]
        self.results |= {reduction: total.result for reduction, total in totals.items()}
        body = Body(self, number, None)
        n, at = self._cells
        for value in self._functions_of_results(number):
            name = self.name("once")
            lines.append(f"{C_TYPES[value.dtype]} {name}{f'[{n}]' if at else ''};")
            self.results[value] = name + at
            body.keep(value, name + at)
        for sink in sinks:
            if self._is_row_sink(sink):
                body.store(sink, self._index_of(sink))
        return lines + self._over_columns([*ends, *body.lines, *body.stores])

    def _functions_of_results(self, number: int) -> list[Value]:
        """Functions of a pass's reductions that have one element for each round of the outer loops,
        and that later passes need: each is computed once, behind the pass."""
        found: dict[Value, None] = {}
        seen: set[Value] = set()
        left = [
            s.value.base if isinstance(s.value, Reduced) else s.value
            for s in self.nest.sinks
            if not self._is_row_sink(s) and self._pass_of(s) > number
        ]
        while left:
            value = left.pop()
            if value in seen or isinstance(value, Reduced) or value in self.kernel.in_memory:
                continue
            seen.add(value)
            is_of_row = isinstance(value, Computed) and value.parts and self.nest.is_row(value)
            if is_of_row and self.level_of(value) == number + 1:
                found[value] = None
            else:
                left += parts_of(value)
        return [*found]

    @property
    def _cells(self) -> tuple[int, str]:
        """How many elements an array has for all columns, and the place of this one in it; 1 and ""
        where an array isn't needed."""
        if not self._columns:
            return 1, ""
        at = Index()
        for variable in self._columns:
            at = at.times(variable.n) + Index(((variable, 1),))
        return math.prod(variable.n for variable in self._columns), f"[{at.text()}]"

    def _over_columns(self, lines: Sequence[str]) -> list[str]:
        return [self._looped(self._columns, lines)] if self._columns and lines else [*lines]

    def _inner_loops(
        self, number: int, stores: Sequence[Sink], totals: Mapping[Reduced, Total]
    ) -> list[str]:
        """The loops of a pass. The innermost one is cut into pieces where a roll wraps around."""
        saves = [v for v in self.saved if self.level_of(v) == number]
        if not (stores or saves or totals):
            return []
        inner = [loop for loop in self.loops if not self._is_outer(loop)]
        innermost = inner[-1] if inner else None
        clauses = "".join(clause for total in totals.values() for clause in total.clauses())
        lines: list[str] = []
        edges = self._edges(innermost)
        for low, high in pairwise(edges):
            body = Body(self, number, (innermost, low))
            for value in saves:
                body.save(value)
            for reduction, total in totals.items():
                body.lines += total.add(body.read(reduction.base, self.full))
            for sink in stores:
                body.store(sink, self._index_of(sink))
            if len(body.lines) * len(edges) > MOST_LINES:
                raise Declined("too many lines")
            if innermost:
                lines += [*body.ahead, f"#pragma omp simd{clauses}"]
                lines.append(self._for(innermost, low, high))
            lines += ["{", *body.lines, *body.stores, "}"]
        loops = self._looped(inner[:-1], lines)
        if self._parted and not self._columns:
            return self._among_threads(inner[0].n, loops, [*totals.values()])
        return [loops]

    def _among_threads(self, n: int, loops: str, totals: Sequence[Total]) -> list[str]:
        """The loops, of which each thread does a part of the first one, with `n` rounds. What
        threads have added up is added in their order, so that each run gives the same."""
        n_threads = self.kernel.n_threads
        parts = [line for total in totals for line in total.begin_parts(n_threads)]
        inside = [line for total in totals for line in (*total.declared(), *total.begin())]
        kept = [line for total in totals for line in total.keep_part("thread")]
        added = [line for total in totals for line in total.add_part("thread")]
        every = _for("thread", 0, n_threads)
        return [
            *parts, f"#pragma omp parallel num_threads({n_threads})", "{", *_share_of(n), *inside,
            loops, *kept, "}", *([f"{every} {{", *added, "}"] if added else []),
        ]  # fmt: skip

    def _edges(self, innermost: Variable | None) -> list[int]:
        """Where the pieces of the innermost loop begin, and where the last one ends."""
        if innermost is None:
            return [0, 1]
        cuts = {(shift - at) % n for variable, at, shift, n in self.rolls if variable == innermost}
        return sorted({0, innermost.n} | {cut for cut in cuts if cut < innermost.n})

    # how the loops are arranged

    def _arrange(self) -> None:
        """Order the loops as memory lies, and join those that can be."""
        stores = [s for s in self.nest.sinks if s.memory is not None and not self._is_row_sink(s)]
        if self.nest.kept is not None:
            self._find_columns()
        elif stores and stores[0].memory:
            steps = dict(stores[0].memory.at(self.full).terms)
            self.loops.sort(key=lambda loop: -steps[loop])
            self._find_lanes()
        self.joined, self.loops = self._joined()
        self._columns = [loop for loop in self.loops if loop in self._columns]
        # functions that are computed one by one take longer than memory that lies apart
        if self.loops and self._lanes is None:
            self._check_strides(self.loops[-1])

    def _find_lanes(self) -> None:
        """Have another loop be the innermost one if that has too few rounds to fill a vector, and
        the nest computes functions."""
        if not self.kernel.functions or math.prod(self.nest.size) < MANY:
            return
        _, loops = self._joined()
        rolled = {variable for variable, *_ in self.rolls}
        long = [one for one in self.loops if one.n >= LEAST_INNER and one not in rolled]
        if not long or loops[-1].n >= LEAST_INNER:
            return
        lanes = long[-1]
        # so few rounds that the memory that they go over stays in the cache
        if isinstance(lanes.n, int) and lanes.n > MOST_LANES:
            part = _largest_divisor(lanes.n, MOST_LANES)
            if part >= LEAST_INNER:
                raise NeedsSplit(lanes, part)
        self._lanes = lanes
        self.loops = [*(one for one in self.loops if one != lanes), lanes]

    def _find_columns(self) -> None:
        """Let the variables of columns be those that step over less memory than a reduced one."""
        steps: dict[Variable, int] = {}
        for access in self.accesses:
            for variable, factor in access.terms:
                steps[variable] = max(steps.get(variable, 0), abs(factor))
        reduced = [loop for loop in self.loops if not self._is_outer(loop)]
        least = min((steps.get(loop, 1) for loop in reduced), default=0)
        outer = [loop for loop in self.loops if self._is_outer(loop)]
        columns = [loop for loop in outer if 0 < steps.get(loop, 0) < least]
        n_columns = math.prod(loop.n for loop in columns)
        if n_columns < LEAST_COLUMNS:
            n_inner = math.prod(self.nest.size[self.kept :])
            is_large = math.prod(self.nest.size) >= MANY
            if not (outer and self.kernel.functions and is_large and n_inner < LEAST_INNER):
                return
            columns = [max(outer, key=lambda loop: -steps.get(loop, 0))]
        columns.sort(key=lambda loop: -steps[loop])
        columns = self._at_a_time(columns)
        self.loops = [*(one for one in self.loops if one not in columns), *columns]
        self._columns = columns
        # each pass computes anew what columns need
        self.saved.clear()

    def _at_a_time(self, columns: list[Variable]) -> list[Variable]:
        """The variables of as many columns as have room on the stack; an outer loop goes over the
        others. Raises NeedsSplit to cut the first one into parts."""
        totals = [s.value for s in self.nest.sinks if isinstance(s.value, Reduced)]
        n_bytes = sum(Total(one, "", at="[]").n_bytes for one in totals)
        for number in range(self._n_passes):
            n_bytes += sum(value.dtype.itemsize for value in self._functions_of_results(number))
        most = MOST_SCRATCH_BYTES // n_bytes
        rolled = {variable for variable, *_ in self.rolls}
        while math.prod(loop.n for loop in columns) > most:
            first, *inner = columns
            n_inner = math.prod(loop.n for loop in inner)
            has_known_size = isinstance(first.n, int) and isinstance(n_inner, int)
            if has_known_size and first not in rolled:
                part = _largest_divisor(first.n, max(most // n_inner, 1))
                if part > 1:
                    raise NeedsSplit(first, part)
            if n_inner < LEAST_COLUMNS:
                raise Declined("many columns")
            columns = inner
        return columns

    def _joined(self) -> tuple[set[Variable], list[Variable]]:
        """The loops, one made of two where each access goes on where the inner loop has ended; and
        those that are part of another now."""
        loops: list[Variable] = []
        joined = {*self.joined}
        for loop in self.loops:
            if loops and self._joins(loops[-1], loop):
                outer = loops.pop()
                joined.add(outer)
                loop = replace(loop, n=outer.n * loop.n)
            loops.append(loop)
        return joined, loops

    def _joins(self, outer: Variable, inner: Variable) -> bool:
        rolled = {variable for variable, *_ in self.rolls}
        if self._group(outer) != self._group(inner) or {outer, inner} & rolled:
            return False
        factors = [dict(access.terms) for access in self.accesses]
        return all(one.get(outer, 0) == one.get(inner, 0) * inner.n for one in factors)

    def _group(self, loop: Variable) -> int:
        if loop == self._lanes:
            return 3
        return 2 if loop in self._columns else self._is_outer(loop)

    def _check_strides(self, innermost: Variable) -> None:
        if math.prod(self.nest.size) < MANY:
            return
        for access in self.accesses:
            if abs(dict(access.terms).get(innermost, 0)) > FAR_APART:
                raise Declined("neighbours lie far apart")


def _largest_divisor(n: int, at_most: int) -> int:
    return max(one for one in range(1, at_most + 1) if n % one == 0)


def _for(variable: str, low: int, high: int, *, is_parted: bool = False) -> str:
    """The head of a loop; `is_parted`: of this thread's part, from `from` to `to`."""
    begin, end = str(low), str(high)
    if is_parted:
        begin, end = f"larger({low}, from)", f"smaller({high}, to)"
    return f"for (long {variable} = {begin}; {variable} < {end}; {variable}++)"


def _share_of(n: int) -> list[str]:
    """The lines that find a thread's part of `n` rounds."""
    return [
        "const long thread = omp_get_thread_num(), n_threads = omp_get_num_threads();",
        f"const long from = {long_of(n)} * thread / n_threads;",
        f"const long to = {long_of(n)} * (thread + 1) / n_threads;",
    ]
