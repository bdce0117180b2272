"""A flush as reports show it: segments and single calls with their lines, bytes and times.

In: a `FlushRecord` of the flush log. Out: a `Flush`, plain data of which `text`, `page` and
`advice` are made. It is computed only when a report is asked for, so that a flush pays nothing.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from lazy_tensor.dispatch.trie.recompile_reason import reason_of_miss
from lazy_tensor.dispatch.trie.trace import Leaf, Node
from lazy_tensor.dispatch.wording import title_of
from lazy_tensor.kernels.segment import TensorSpec, counted, n_bytes
from lazy_tensor.reports.places import shortened

if TYPE_CHECKING:
    from lazy_tensor.dispatch.plan.plan import Step as PlanStep
    from lazy_tensor.dispatch.stats import FlushRecord


@dataclass(frozen=True, slots=True)
class Op:
    """A recorded call: its aten op, the user's line (`path:line`), its results ("f32[8, 64]")."""

    name: str
    where: str
    gives: str


@dataclass(frozen=True, slots=True)
class Step:
    """One thing that a flush ran: a segment, or a single call.

    `status` and `reason` say what ran a segment, or why a call is in none. `takes` and `gives` are
    its arguments and results, as "f32[8, 64]". `n_bytes` are all bytes read and written,
    `n_bytes_given` those of the results, `n_bytes_saved` those of values inside a segment, which
    were never written to memory. `seconds` is None if the step was not timed. `needs` are the
    indices of those steps of the flush whose results it uses.
    """

    is_segment: bool
    ops: tuple[Op, ...]
    status: str
    reason: str
    takes: tuple[str, ...]
    gives: tuple[str, ...]
    n_bytes: int
    n_bytes_given: int
    n_bytes_saved: int
    seconds: float | None
    needs: tuple[int, ...]
    device: str

    @property
    def title(self) -> str:
        """The names of its ops; of more than `MOST_NAMED`, the most frequent with counts."""
        bases = [op.name.split(".")[1] if "." in op.name else op.name for op in self.ops]
        names = list(map(title_of, bases))
        if len(names) <= MOST_NAMED:
            return ", ".join(names)
        return counted(names, MOST_NAMED)

    @property
    def lines(self) -> str:
        """The user's lines, as `train.py:40-44`."""
        return shortened(op.where for op in self.ops)


MOST_NAMED = 6
"""Names up to which a step's title lists all ops in order."""


@dataclass(frozen=True, slots=True)
class Flush:
    """One flush. All times are seconds.

    In the `gap_s` since the sync point before it, the program and its recording ran; `grown_s` of
    these made new states of the trie. `seconds` is the whole flush, `plan_s` of it finding or
    building the plan. `miss` says what was new in the program, "" if nothing. `how` says whether a
    plan ran it ("one by one": the trace was seen for the first time). `peak_bytes` is the most
    memory that the plan's values need at a time, as the plan foretells.
    """

    thread: str
    cause: str
    where: str
    n_ops: int
    began_s: float
    seconds: float
    plan_s: float
    gap_s: float
    grown_s: float
    raised: str
    miss: str
    how: str
    peak_bytes: int
    steps: tuple[Step, ...]

    @property
    def n_bytes_saved(self) -> int:
        """Bytes of values that stayed inside kernels."""
        return sum(step.n_bytes_saved for step in self.steps)

    @property
    def ran_s(self) -> float:
        """Seconds without planning."""
        return self.seconds - self.plan_s

    @property
    def likeness(self) -> tuple[object, ...]:
        """Equal for flushes that did the same, whatever their sizes: reports show them once."""
        titles = tuple([(step.title, step.status) for step in self.steps])
        return (self.thread, self.cause, self.where, self.raised, titles)


COPIED = (
    "thread", "cause", "where", "n_ops", "began_s", "seconds", "plan_s", "gap_s", "grown_s",
    "raised", "peak_bytes",
)  # fmt: skip
"""What a flush has from its record as it is, and shows on the page."""


def looked_at(records: Iterable[FlushRecord]) -> list[Flush]:
    """The flushes of the log, in its order: the oldest first."""
    return list(map(_flush, records))


def alike(flushes: Sequence[Flush]) -> list[list[int]]:
    """Groups of indices of flushes that did the same, in the order of each group's first."""
    groups: dict[tuple[object, ...], list[int]] = {}
    for i, flush in enumerate(flushes):
        groups.setdefault(flush.likeness, []).append(i)
    return list(groups.values())


def _flush(record: FlushRecord) -> Flush:
    if record.steps is None:
        how = "one by one"
    else:
        how = "by a new plan" if record.was_built else "by a known plan"
        how += f" ({record.tier})" if record.tier else ""
    return Flush(
        **{name: getattr(record, name) for name in COPIED},
        miss="" if record.first_new is None else reason_of_miss(record.first_new, record.state),
        how=how,
        steps=tuple(_steps(record)),
    )


def _steps(record: FlushRecord) -> list[Step]:
    """What the flush ran, in order: the steps of its plan, or its calls if it had no plan."""
    if record.state is None:
        return []
    recorded = record.state.steps()
    specs = _specs(recorded)
    maker: dict[int, int] = {}
    found: list[Step] = []
    # without a plan the calls ran one by one
    if record.steps is None:
        for node in recorded:
            if isinstance(node, Node):
                _add(found, maker, specs, (node,), node.reads, node.makes, ("aten", _reason(node)))
        return found
    # statuses are of the plan's segments alone, in order; times are missing where none was taken
    fusions = iter(zip(record.statuses, record.reasons, strict=True))
    times: list[float | None] = list(record.steps_s)
    times += [None] * (len(record.steps) - len(times))
    for step, seconds in zip(record.steps, times, strict=True):
        status, reason = ("aten", step.reason) if step.fusion is None else next(fusions)
        if step.fusion is not None and status == "ready":
            status = step.fusion.backend.name
        _add(
            found, maker, specs, step.nodes, step.reads, step.sets, (status, reason), seconds, step
        )
    return found


def _reason(node: Node) -> str:
    """Why a call ran by itself in a trace without a plan."""
    return "a view" if node.view_of is not None else "seen for the first time"


def _add(
    found: list[Step],
    maker: dict[int, int],
    specs: dict[int, TensorSpec],
    nodes: tuple[Node, ...],
    reads: tuple[int, ...],
    sets: tuple[int, ...],
    told: tuple[str, str],
    seconds: float | None = None,
    step: PlanStep | None = None,
) -> None:
    """Append the `Step` of these nodes to `found`. `maker` has the step that made each slot."""
    # a view reads and writes no memory; views inside a segment are no values of their own
    is_view = len(nodes) == 1 and nodes[0].view_of is not None
    own = {slot for node in nodes if node.view_of is None for slot in node.makes}
    written = {slot for node in nodes for slot in node.writes}
    # a slot counts once if it is read several times, but again if it is written in place
    moved = 0 if is_view else _total((*dict.fromkeys(reads), *sets, *written), specs)
    found.append(
        Step(
            is_segment=step is not None and step.fusion is not None,
            ops=tuple([Op(str(node.facts.op), node.where, _shown(node.specs)) for node in nodes]),
            status=told[0],
            reason=told[1],
            takes=tuple([shown(specs[slot]) for slot in reads if slot in specs]),
            gives=tuple([shown(specs[slot]) for slot in sets if slot in specs]),
            n_bytes=moved,
            n_bytes_given=_total(sets, specs),
            n_bytes_saved=_total(own.difference(sets), specs) if step is not None else 0,
            seconds=seconds,
            needs=tuple(sorted({maker[slot] for slot in reads if slot in maker})),
            device=next((specs[s].device.type for s in (*sets, *reads) if s in specs), "cpu"),
        )
    )
    for slot in (*sets, *written):
        maker[slot] = len(found) - 1


def _specs(recorded: list[Node | Leaf]) -> dict[int, TensorSpec]:
    """Size, strides, dtype and device of each slot of a trace."""
    specs: dict[int, TensorSpec] = {}
    for step in recorded:
        if isinstance(step, Leaf):
            specs[step.slot] = step.spec
        else:
            pairs = zip(step.outs, step.specs, strict=True)
            specs.update({slot: spec for slot, spec in pairs if slot is not None and spec})
    return specs


def _total(slots: Iterable[int], specs: dict[int, TensorSpec]) -> int:
    return sum(n_bytes(specs[slot]) for slot in slots if slot in specs)


def _shown(specs: tuple[TensorSpec | None, ...]) -> str:
    return ", ".join(shown(spec) for spec in specs if spec is not None)


# the begin of a dtype's name, and what is shown in its place
SHORT = {"float": "f", "bfloat": "bf", "int": "i", "uint": "u", "complex": "c", "bool": "bool"}


def shown(spec: TensorSpec) -> str:
    """Dtype and sizes of a tensor, as `f32[8, 64]`."""
    name = str(spec.dtype).removeprefix("torch.")
    kind = name.rstrip("0123456789")
    sizes = ", ".join(map(str, spec.size))
    return f"{SHORT.get(kind, kind)}{name[len(kind) :]}[{sizes}]"


def amount(n: float) -> str:
    """A number of bytes with its unit: `1.5 MiB`."""
    if round(n) < KIB:
        return f"{n:.0f} B"
    # by the rounded number: 1048575 bytes are 1.0 MiB, not 1024.0 KiB
    power = 1
    while power < len(UNITS) and round(n / KIB**power, 1) >= KIB:
        power += 1
    return f"{n / KIB**power:.1f} {UNITS[power - 1]}"


KIB, UNITS = 1024, ("KiB", "MiB", "GiB", "TiB")
