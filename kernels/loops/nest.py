"""The text of one nest: its passes, the order of its loops, and where these are cut.

In: a `Nest`. Out: C++. Called by `write`.

A nest makes one pass over its inner dimensions, and another one for each reduction that its later
values need: a softmax is three passes over each row. The accumulator of a row is a variable. Where
the elements of a reduction lie apart in memory, neighbouring reductions run side by side: each is a
*column*, and an array has one accumulator per column.
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
"""The most lines of a loop's body in all its pieces: compile time grows with them."""
MOST_ROUNDS = 8
"""The most times that a text is written again because a roll has cut it into more pieces."""
FAR_APART = 8
"""The most elements between neighbours of the innermost loop, in nests of `MANY` elements or more.
With a larger stride each element costs a whole cache line; Inductor works in tiles there."""
MANY = 1 << 14
MOST_SCRATCH_BYTES = 256 << 10
"""The most memory on the stack that a thread keeps between passes."""
LEAST_INNER = 16
"""The least elements of a row that is reduced by itself, in large nests with functions.

A shorter row doesn't fill a vector, and would be computed one by one. Instead the vector takes the
first elements of many rows, then their second ones: a softmax of 100,000 rows of 8 takes a third of
the time."""
MOST_LANES = 64
"""The most iterations of the loop that `_find_lanes` makes the innermost, if its size has such a
divisor."""
LEAST_COLUMNS = 8
"""The least columns that are reduced side by side; fewer are reduced one by one."""
LEAST_PARALLEL = 1 << 15
"""The least elements of a nest that threads share: starting them takes some microseconds."""


class Loops(NestText):
    """Writes one nest.

    The text is written at least twice. First each dimension has a loop of its own, to learn the
    strides of all accesses. Then the loops are ordered by these, and loops over contiguous
    dimensions are merged.
    """

    def __init__(self, kernel: Kernel, nest: Nest) -> None:
        super().__init__(kernel, nest)
        # variables of the loops over columns, which are inside of those over reduced dimensions
        self._columns: list[Variable] = []
        # the variable that is vectorized, if it is not the one of the least strides
        self._lane_variable: Variable | None = None
        self._n_splits = 0
        # `_pass_of` reads it: 1 leaves stores of inputs in the passes of their values
        self._n_passes = 1
        self._n_passes += max(map(self._pass_of, nest.sinks))

    # which pass computes what

    def _pass_of(self, sink: Sink) -> int:
        if self._is_row_sink(sink):
            # behind the pass that computes the reductions it needs
            return max(self.level_of(sink.value) - 1, 0)
        level = self.level_of(sink.value, inside=True)
        # an input is stored in the last pass, after all reads of it
        return max(level, self._n_passes - 1) if sink.is_input else level

    def _is_row_sink(self, sink: Sink) -> bool:
        """Whether it stores one element for each iteration of the outer loops."""
        if isinstance(sink.value, Reduced):
            return sink.memory is not None
        return sink.over != self.nest.over

    def _index_of(self, sink: Sink) -> Indices:
        return self.row(sink.value) if self._is_row_sink(sink) else self.full

    def _find_saved(self) -> None:
        """Find the values that a pass computes and a later one needs."""
        seen: set[tuple[Value, int]] = set()
        # values with the number of the pass that needs them
        stack = [
            (s.value.base if isinstance(s.value, Reduced) else s.value, self._pass_of(s))
            for s in self.nest.sinks
            if not self._is_row_sink(s)
        ]
        while stack:
            value, at = stack.pop()
            if (value, at) in seen or isinstance(value, Reduced) or value in self.kernel.in_memory:
                continue
            seen.add((value, at))
            level = self.level_of(value)
            if level < at and value.size == self.nest.over and not is_cheap(value):
                self._keep(value)
                stack.append((value, level))
            else:
                stack += [(part, at) for part in parts_of(value)]
        n = math.prod(self.nest.size[self.kept :])
        if sum(n * value.dtype.itemsize for value in self.saved) > MOST_SCRATCH_BYTES:
            raise Declined("much is kept between passes")

    def _keep(self, value: Value) -> None:
        """Keep a value for later passes: in its own memory if it is a result, else in an array."""
        for sink in self.nest.sinks:
            if sink.value is value and sink.memory is not None and not sink.is_input:
                self.stored[value] = sink.memory
                return
        self.saved.setdefault(value, f"saved{len(self.saved)}")

    # the text

    def text(self) -> str:
        self._find_saved()
        self.writes = [
            (sink.memory.name, sink.memory.at(self._index_of(sink)), self._pass_of(sink))
            for sink in self.nest.sinks
            if sink.memory is not None and sink.is_input
        ]
        try:
            self._text_of_passes()
            self._arrange()
        except NeedsSplit as split:
            self._split(split.variable, split.n)
            return self.text()
        # the text of one more piece may have rolls that wrap around elsewhere
        for _ in range(MOST_ROUNDS):
            n_rolls = len(self.rolls)
            self.begin()
            text = self._text_of_passes()
            if len(self.rolls) == n_rolls:
                return text
        raise Declined("rolls of rolls")

    def _split(self, variable: Variable, n: int) -> None:
        """Replace the loop of a variable by two nested ones, the inner one of `n` iterations."""
        place = self.loops.index(variable)
        self._n_splits += 1
        self.loops[place : place + 1] = [
            Variable(f"i{variable.dim}of{self._n_splits}", variable.n // n, variable.dim),
            replace(variable, n=n),
        ]
        self.index = self._index()
        self.rolls.clear()
        self.begin()

    def _text_of_passes(self) -> str:
        n = math.prod(self.nest.size[self.kept :])
        lines = [f"{stored_type(v.dtype)} {name}[{n}];" for v, name in self.saved.items()]
        self.results = {}
        for number in range(self._n_passes):
            lines += self._lines_of_pass(number)
        outer = [loop for loop in self.loops if self._is_outer(loop)]
        n_threads = self.kernel.n_threads
        if self._columns and self._thread_variable:
            begin = [f"#pragma omp parallel num_threads({n_threads})", "{"]
            lines = [*begin, *_share_of(self._columns[0].n), *lines, "}"]
        body = self._in_loops(outer, lines)
        if self._is_shared and outer:
            body = f"#pragma omp parallel for num_threads({n_threads})\n{body}"
        return f"{{\n{body}\n}}"

    @property
    def _is_shared(self) -> bool:
        """Whether threads share the nest."""
        return self.kernel.n_threads > 1 and math.prod(self.nest.size) >= LEAST_PARALLEL

    @property
    def _thread_variable(self) -> str:
        """The variable of the inner loop that threads share; "" if they share outer loops."""
        inner = [loop for loop in self.loops if not self._is_outer(loop)]
        if not self._is_shared or not inner or len(inner) < len(self.loops):
            return ""
        return self._columns[0].name if self._columns else inner[0].name

    def _in_loops(self, loops: Sequence[Variable], lines: Sequence[str]) -> str:
        """The lines in loops."""
        text = "\n".join(lines)
        for variable in reversed(loops):
            hoisted = "\n".join(self.hoisted.get(variable.name, []))
            text = f"{self._for(variable, 0, variable.n)} {{\n{hoisted}\n{text}\n}}"
        return text

    def _for(self, variable: Variable, low: int, high: int) -> str:
        """The head of a loop."""
        return _for(variable.name, low, high, is_shared=variable.name == self._thread_variable)

    def _is_outer(self, loop: Variable) -> bool:
        return loop.dim < self.kept and loop not in self._columns

    def _lines_of_pass(self, number: int) -> list[str]:
        """The lines of one pass: accumulators, loops, results of reductions, row values."""
        sinks = [sink for sink in self.nest.sinks if self._pass_of(sink) == number]
        reductions = [s.value for s in sinks if isinstance(s.value, Reduced) and s.memory is None]
        totals = {r: Total(r, self.name("total"), *self._cells) for r in reductions}
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
        """Functions of a pass's reductions with one element per iteration of the outer loops.

        Later passes need them, so each is computed once, behind the pass.
        """
        functions: dict[Value, None] = {}
        seen: set[Value] = set()
        stack = [
            s.value.base if isinstance(s.value, Reduced) else s.value
            for s in self.nest.sinks
            if not self._is_row_sink(s) and self._pass_of(s) > number
        ]
        while stack:
            value = stack.pop()
            if value in seen or isinstance(value, Reduced) or value in self.kernel.in_memory:
                continue
            seen.add(value)
            is_of_row = isinstance(value, Computed) and value.parts and self.nest.is_row(value)
            if is_of_row and self.level_of(value) == number + 1:
                functions[value] = None
            else:
                stack += parts_of(value)
        return [*functions]

    @property
    def _cells(self) -> tuple[int, str]:
        """The length of an array with one element per column, and the subscript of the current one.

        1 and "" if there are no columns, and so no array is needed.
        """
        if not self._columns:
            return 1, ""
        at = Index()
        for variable in self._columns:
            at = at.times(variable.n) + Index(((variable, 1),))
        return math.prod(variable.n for variable in self._columns), f"[{at.text()}]"

    def _over_columns(self, lines: Sequence[str]) -> list[str]:
        return [self._in_loops(self._columns, lines)] if self._columns and lines else [*lines]

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
        loops = self._in_loops(inner[:-1], lines)
        if self._thread_variable and not self._columns:
            return self._with_threads(inner[0].n, loops, [*totals.values()])
        return [loops]

    def _with_threads(self, n: int, loops: str, totals: Sequence[Total]) -> list[str]:
        """The loops, the first of which, of `n` iterations, is shared among threads.

        The threads' totals are added up in the order of the threads, so that each run gives the
        same result.
        """
        n_threads = self.kernel.n_threads
        parts = [line for total in totals for line in total.begin_parts(n_threads)]
        inside = [line for total in totals for line in (*total.declared(), *total.begin())]
        keeps = [line for total in totals for line in total.keep_part("thread")]
        adds = [line for total in totals for line in total.add_part("thread")]
        every = _for("thread", 0, n_threads)
        return [
            *parts, f"#pragma omp parallel num_threads({n_threads})", "{", *_share_of(n), *inside,
            loops, *keeps, "}", *([f"{every} {{", *adds, "}"] if adds else []),
        ]  # fmt: skip

    def _edges(self, innermost: Variable | None) -> list[int]:
        """Where the pieces of the innermost loop begin, and where the last one ends."""
        if innermost is None:
            return [0, 1]
        cuts = {(shift - at) % n for variable, at, shift, n in self.rolls if variable == innermost}
        return sorted({0, innermost.n} | {cut for cut in cuts if cut < innermost.n})

    # how the loops are arranged

    def _arrange(self) -> None:
        """Order the loops by their strides in memory, and merge those that can be."""
        stores = [s for s in self.nest.sinks if s.memory is not None and not self._is_row_sink(s)]
        if self.nest.kept is not None:
            self._find_columns()
        elif stores and stores[0].memory:
            steps = dict(stores[0].memory.at(self.full).terms)
            self.loops.sort(key=lambda loop: -steps[loop])
            self._find_lanes()
        self.joined, self.loops = self._merge_loops()
        self._columns = [loop for loop in self.loops if loop in self._columns]
        # `_find_lanes` accepts large strides, since functions that aren't vectorized take longer
        if self.loops and self._lane_variable is None:
            self._decline_far_apart(self.loops[-1])

    def _find_lanes(self) -> None:
        """Make another loop the innermost one, if that has too few iterations to fill a vector.

        Only in nests that compute functions, which take long without vectors.
        """
        if not self.kernel.functions or math.prod(self.nest.size) < MANY:
            return
        _, loops = self._merge_loops()
        rolled = {variable for variable, *_ in self.rolls}
        long = [loop for loop in self.loops if loop.n >= LEAST_INNER and loop not in rolled]
        if not long or loops[-1].n >= LEAST_INNER:
            return
        lanes = long[-1]
        # so few iterations that the memory of all of them stays in the cache
        if isinstance(lanes.n, int) and lanes.n > MOST_LANES:
            part = _largest_divisor(lanes.n, MOST_LANES)
            if part >= LEAST_INNER:
                raise NeedsSplit(lanes, part)
        self._lane_variable = lanes
        self.loops = [*(loop for loop in self.loops if loop != lanes), lanes]

    def _find_columns(self) -> None:
        """Find the loops over columns: kept dimensions of smaller strides than reduced ones."""
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
        columns = self._columns_that_fit(columns)
        self.loops = [*(loop for loop in self.loops if loop not in columns), *columns]
        self._columns = columns
        # with columns, each pass computes anew what earlier ones have computed
        self.saved.clear()

    def _columns_that_fit(self, columns: list[Variable]) -> list[Variable]:
        """The inner ones of the loops `columns`, so many that their arrays fit on the stack.

        The others stay outer loops. Raises NeedsSplit to divide the first loop between the two.
        """
        reductions = [s.value for s in self.nest.sinks if isinstance(s.value, Reduced)]
        n_bytes = sum(Total(reduction, "", at="[]").n_bytes for reduction in reductions)
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

    def _merge_loops(self) -> tuple[set[Variable], list[Variable]]:
        """The variables of loops that became part of the next one, and the loops that remain.

        Two loops are merged if, in each access, the outer one's stride is the inner one's extent.
        """
        loops: list[Variable] = []
        joined = {*self.joined}
        for loop in self.loops:
            if loops and self._can_merge(loops[-1], loop):
                outer = loops.pop()
                joined.add(outer)
                loop = replace(loop, n=outer.n * loop.n)
            loops.append(loop)
        return joined, loops

    def _can_merge(self, outer: Variable, inner: Variable) -> bool:
        rolled = {variable for variable, *_ in self.rolls}
        if self._loop_group(outer) != self._loop_group(inner) or {outer, inner} & rolled:
            return False
        factors = [dict(access.terms) for access in self.accesses]
        return all(terms.get(outer, 0) == terms.get(inner, 0) * inner.n for terms in factors)

    def _loop_group(self, loop: Variable) -> int:
        """A number for the loop's kind: only loops of the same kind can be merged."""
        if loop == self._lane_variable:
            return 3
        return 2 if loop in self._columns else self._is_outer(loop)

    def _decline_far_apart(self, innermost: Variable) -> None:
        if math.prod(self.nest.size) < MANY:
            return
        for access in self.accesses:
            if abs(dict(access.terms).get(innermost, 0)) > FAR_APART:
                raise Declined("neighbours lie far apart")


def _largest_divisor(n: int, at_most: int) -> int:
    return max(divisor for divisor in range(1, at_most + 1) if n % divisor == 0)


def _for(variable: str, low: int, high: int, *, is_shared: bool = False) -> str:
    """The head of a loop; with `is_shared`, of the thread's part of it, from `from` to `to`."""
    begin, end = str(low), str(high)
    if is_shared:
        begin, end = f"larger({low}, from)", f"smaller({high}, to)"
    return f"for (long {variable} = {begin}; {variable} < {end}; {variable}++)"


def _share_of(n: int) -> list[str]:
    """The lines that find a thread's part of `n` iterations."""
    return [
        "const long thread = omp_get_thread_num(), n_threads = omp_get_num_threads();",
        f"const long from = {long_of(n)} * thread / n_threads;",
        f"const long to = {long_of(n)} * (thread + 1) / n_threads;",
    ]
