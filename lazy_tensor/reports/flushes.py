"""A flush as people look at it: segments and single calls with their lines, bytes and times.

In: a `FlushRecord`. Out: `Flush`, plain data that text and page are made from. Nothing of this is
computed before somebody asks for a report.
"""

from __future__ import annotations

import math
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
    """A recorded call: its aten op, the user's line, what it gives ("f32[8, 64]")."""

    name: str
    where: str
    gives: str


@dataclass(frozen=True, slots=True)
class Step:
    """One thing that a flush ran: a segment, or a single call.

    `status` and `reason` say what ran a segment, or why a call is in none. `n_bytes` are read and
    written, `n_bytes_given` those of its results, `n_bytes_saved` those of values inside that were
    never written. `seconds` is None where nobody timed. `needs` are the numbers of the flush's
    steps whose results it uses.
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
        """Its ops' names, counted where there are many."""
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


@dataclass(frozen=True, slots=True)
class Flush:
    """One flush, looked at. Times in seconds; `gap_s` from the sync point before it, in which the
    program and recording ran, of which `grown_s` went into states that were new.

    `miss` says which part of the program was new, "" if none; `how` whether a plan ran it ("one by
    one": it was seen for the first time); `peak_bytes` is foretold.
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
        """The same for flushes that did the same, whatever the sizes."""
        titles = tuple([(step.title, step.status) for step in self.steps])
        return (self.thread, self.cause, self.where, self.raised, titles)


def looked_at(records: Iterable[FlushRecord]) -> list[Flush]:
    """The flushes, oldest first."""
    return list(map(_flush, records))


def alike(flushes: Sequence[Flush]) -> list[list[int]]:
    """The numbers of flushes that did the same, together, in the order of the first of each."""
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
        thread=record.thread,
        cause=record.cause,
        where=record.where,
        n_ops=record.n_ops,
        began_s=record.began_s,
        seconds=record.seconds,
        plan_s=record.plan_s,
        gap_s=record.gap_s,
        grown_s=record.grown_s,
        raised=record.raised,
        miss="" if record.first_new is None else reason_of_miss(record.first_new, record.state),
        how=how,
        peak_bytes=record.peak_bytes,
        steps=tuple(_steps(record)),
    )


def _steps(record: FlushRecord) -> list[Step]:
    if record.state is None:
        return []
    recorded = record.state.steps()
    specs = _specs(recorded)
    maker: dict[int, int] = {}
    found: list[Step] = []
    if record.steps is None:
        for node in recorded:
            if isinstance(node, Node):
                outs = tuple([slot for slot in node.outs if slot is not None])
                _add(found, maker, specs, (node,), node.reads, outs, ("aten", _reason(node)))
        return found
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
    """Why a call of a trace without a plan ran alone."""
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
    is_view = len(nodes) == 1 and nodes[0].view_of is not None
    inside = {
        slot
        for node in nodes
        if node.view_of is None
        for slot in node.outs
        if slot is not None and slot not in sets
    }
    written = {slot for node in nodes for slot in node.writes}
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
            n_bytes_saved=_total(inside, specs) if step is not None else 0,
            seconds=seconds,
            needs=tuple(sorted({maker[slot] for slot in reads if slot in maker})),
            device=next((specs[s].device.type for s in (*sets, *reads) if s in specs), "cpu"),
        )
    )
    for slot in (*sets, *written):
        maker[slot] = len(found) - 1


def _specs(recorded: list[Node | Leaf]) -> dict[int, TensorSpec]:
    specs: dict[int, TensorSpec] = {}
    for step in recorded:
        if isinstance(step, Leaf):
            specs[step.slot] = step.spec
        else:
            for slot, spec in zip(step.outs, step.specs, strict=True):
                if slot is not None and spec is not None:
                    specs[slot] = spec
    return specs


def _total(slots: Iterable[int], specs: dict[int, TensorSpec]) -> int:
    return sum(n_bytes(specs[slot]) for slot in slots if slot in specs)


def _shown(specs: tuple[TensorSpec | None, ...]) -> str:
    return ", ".join(shown(spec) for spec in specs if spec is not None)


SHORT = {"float": "f", "bfloat": "bf", "int": "i", "uint": "u", "complex": "c", "bool": "bool"}


def shown(spec: TensorSpec) -> str:
    """Dtype and sizes as `f32[8, 64]`."""
    name = str(spec.dtype).removeprefix("torch.")
    kind = name.rstrip("0123456789")
    sizes = ", ".join(map(str, spec.size))
    return f"{SHORT.get(kind, kind)}{name[len(kind) :]}[{sizes}]"


def amount(n: float) -> str:
    """Bytes as people read them: `1.5 MiB`."""
    if n < KIB:
        return f"{n:.0f} B"
    power = min(int(math.log(n, KIB)), len(UNITS))
    return f"{n / KIB**power:.1f} {UNITS[power - 1]}"


KIB, UNITS = 1024, ("KiB", "MiB", "GiB", "TiB")
