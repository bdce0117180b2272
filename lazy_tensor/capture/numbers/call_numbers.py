"""What a recorded call does with the numbers that it reads, and with those that it finds kept.

In: the tape of the call, which has its reads and notes what it did with them. Out: `CallNumbers`,
which tells which numbers have to be the same in a replay, and how a replay makes the others. Called
by `take`, for `captured_call`.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable
from typing import Any

from lazy_tensor.capture.numbers.kept_numbers import KeptNumbers
from lazy_tensor.capture.object_graph import ObjectGraph
from lazy_tensor.capture.outline import Outline, Returned
from lazy_tensor.capture.watched_object import Place, is_atom
from lazy_tensor.dispatch.run.tape import Read, Tape
from lazy_tensor.dispatch.traced_number import (
    TRACED,
    TracedNumber,
    TracedSize,
    counts_in,
    reads_in,
)
from lazy_tensor.dispatch.trie.trace import Node

KeptNumber = tuple[Place, str, type]
"""A place, text that says what the call leaves there, and the type of what it found."""


class CallNumbers:
    """The numbers of one call. In texts they are `r[i]`: see `traced_number`.

    `deciding` are reads whose numbers have to be the same in a replay. `returned` are those of
    numbers that the call only returns, by their places among the `leaves` of what it returns.
    `kept` are numbers that it finds and changes, or compares: other ones there may be others.
    `checks` are operations that decide what it does. `arguments` are numbers among its arguments,
    each with its place there. `computed_from` tells where the numbers come from that a replay
    computes with behind its plan.
    """

    def __init__(
        self,
        nodes: list[Node],
        leaf_at: dict[int, int],
        root_of: Callable[[int], int],
        tape: Tape,
        kept: KeptNumbers,
        before: ObjectGraph,
        leaves: list[Any],
        alike: tuple[Iterable[Outline], Outline | None],
        n_arguments: int,
    ) -> None:
        """`nodes`, `leaf_at` (the numbers of leaves by their slots) and `root_of` are the trace's.
        `alike` are outlines of calls that may have done the same, and of one that should.
        `n_arguments` numbers among the arguments are followed."""
        self._nodes, self._leaf_at, self._root_of = nodes, leaf_at, root_of
        self.reads = tape.reads
        # what replays read later isn't what the call read, if it wrote there meanwhile
        self.written = {i for i, read in enumerate(tape.reads) if not self._lasts(read)}
        """Reads whose memory is written later."""
        self._fixed = tape.numbers.fixed | self.written
        self._found = {-1 - k: before.value_at(place) for k, place in enumerate(kept.places)}
        self.arguments = {-1 - len(self._found) - k: k for k in range(n_arguments)}
        used = [*(check.text for check in tape.numbers.checks), *tape.numbers.given]
        self.kept = self._kept(kept, leaves, used)
        self.returned = self._returned(leaves, *alike)
        self.deciding = [
            read
            for i, read in enumerate(tape.reads)
            if not (self._is_free(i) or read in self.returned.values())
        ]
        given = [self.as_returned(leaf) for leaf in leaves if type(leaf) in TRACED]
        computed = [one.name for one in given if one.kind == "computed"]
        computed += [text for i, (_, text, _) in self.kept.items() if text != f"r[{i}]"]
        self.computed_from = {i: self.source_of(i) for text in computed for i in reads_in(text)}
        self.checks = tape.numbers.checks

    def needed_for(self, texts: Iterable[str]) -> tuple[set[int], dict[int, float]]:
        """What these texts are computed from besides kept numbers and arguments: the reads, and the
        numbers that never change."""
        needed = {i for text in texts for i in reads_in(text)}
        others = needed - self.kept.keys() - self.arguments.keys()
        return {i for i in needed if i >= 0}, {i: self._found[i] for i in others if i < 0}

    @property
    def keys_of_reads(self) -> tuple[Any, ...]:
        """What the reads of another call must be equal to. Those of `returned` are left out."""
        free = [read.key(by_value=False) for i, read in enumerate(self.reads) if self._is_free(i)]
        return (*[read.key(by_value=True) for read in self.deciding], *free)

    @property
    def values_returned(self) -> dict[int, Any]:
        """Keys for the values of the numbers in `returned`, by the same places."""
        return {i: _value_key(read.number) for i, read in self.returned.items()}

    def is_kept(self, place: Place) -> bool:
        """Whether a replay puts the number at a place where the call has left another one."""
        return any(place == one for one, _, _ in self.kept.values())

    def as_returned(self, number: Read | TracedNumber | TracedSize) -> Returned:
        """How a replay gives a number back."""
        if isinstance(number, (TracedNumber, TracedSize)):
            for i in reads_in(number.text):
                if number.text == f"r[{i}]":
                    return self.source_of(i)
            return Returned("computed", number.text)
        kind = "list" if number.is_list else "number"
        if number.slot in self._leaf_at:
            return Returned(f"leaf {kind}", self._leaf_at[number.slot])
        return Returned(kind, number.slot)

    def source_of(self, i: int) -> Returned:
        """How a replay gets the number `r[i]` when its plan has run."""
        if i in self.kept:
            return Returned("kept", self.kept[i][0])
        if i in self.arguments:
            return Returned("number argument", self.arguments[i])
        if i < 0 or i in self._fixed:
            return Returned("constant", self._found[i] if i < 0 else self.reads[i].number)
        return self.as_returned(self.reads[i])

    def _is_free(self, i: int) -> bool:
        """Whether the number of a read may be another one, as all that is done with it is noted."""
        return self.reads[i].is_noted and i not in self._fixed

    def _lasts(self, read: Read) -> bool:
        """Whether the call doesn't write the memory that it read, after the read."""
        root = self._root_of(read.slot)
        later = self._nodes[read.n_ops :]
        return all(self._root_of(slot) != root for node in later for slot in node.writes)

    def _kept(self, kept: KeptNumbers, leaves: list[Any], used: list[str]) -> dict[int, KeptNumber]:
        """See `kept`; `used` are texts of numbers that the call compares or gives to ops. A number
        that the call neither changes nor uses has to stay as it is."""
        texts = {-1 - k: kept.texts[place] for k, place in enumerate(kept.places)}
        changed = {i: text for i, text in texts.items() if text != f"r[{i}]"}
        used += [leaf.text for leaf in leaves if type(leaf) in TRACED]
        wanted = set(changed).union(*map(reads_in, [*used, *changed.values()])) - self._fixed
        return {
            i: (kept.places[-1 - i], text, type(self._found[i]))
            for i, text in texts.items()
            if text and i in wanted and not counts_in(text)
        }

    def _returned(
        self, leaves: list[Any], earlier: Iterable[Outline], like: Outline | None
    ) -> dict[int, Read]:
        """The leaves that are numbers which the call does nothing with but return, each with its
        read, where no traced number tells that.

        Nothing tells which read such a number came from. So the call must return a value as often
        as it read it, and must have read it in one place; or it returns what it read in the same
        places as an earlier call.
        """
        only_returned = [read for read in self.reads if read.is_only_returned]
        free = [read for read in only_returned if self._lasts(read)]
        if like is not None:
            return self._returned_as_in(like, leaves, free)
        found = [self._returned_as_in(outline, leaves, free) for outline in earlier]
        places: dict[Any, list[int]] = defaultdict(list)
        for i, leaf in enumerate(leaves):
            places[_value_key(leaf)].append(i)
        by_value: dict[Any, list[Read]] = defaultdict(list)
        for read in self.reads:
            if not read.is_noted:
                by_value[_value_key(read.number)].append(read)
        by_count: dict[int, Read] = {}
        for value, reads in by_value.items():
            are_one = len({read.slot for read in reads}) == 1
            if are_one and len(reads) == len(places[value]) and all(one in free for one in reads):
                by_count.update(zip(places[value], reads, strict=True))
        return max([*found, by_count], key=len)

    def _returned_as_in(
        self, earlier: Outline, leaves: list[Any], free: list[Read]
    ) -> dict[int, Read]:
        """The numbers where an earlier call returned some; none if others are there now."""
        found: dict[int, Read] = {}
        for i in earlier.numbers_returned if len(earlier.returned) == len(leaves) else ():
            fitting = [
                read
                for read in free
                if self.as_returned(read) == earlier.returned[i]
                and _value_key(read.number) == _value_key(leaves[i])
                and read not in found.values()
            ]
            if not fitting:
                return {}
            found[i] = fitting[0]
        return found


def _value_key(value: Any) -> tuple[type, str | int]:
    """Equal for equal numbers of one type; other objects have a key each."""
    return type(value), repr(value) if is_atom(value) else id(value)
