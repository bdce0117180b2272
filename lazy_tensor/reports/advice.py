"""Advice: the changes to a program that would help most, and the share of time that each may save.

In: flushes as `reports.flushes` gives them, blocks that were timed, what became of kernels. Out: at
most three sentences. A change is advised only if the program can make it and its gain can be
estimated from above. `benches/bench_advice.py` measures what following the advice gains.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from lazy_tensor.dispatch.plan.plan import NOTHING_FUSED
from lazy_tensor.dispatch.stats import KERNELS, RECORDED
from lazy_tensor.dispatch.trie.recompile_reason import latest_difference
from lazy_tensor.dispatch.wording import DISTRIBUTION_CHECK
from lazy_tensor.reports.bandwidth import limit_bytes_per_s
from lazy_tensor.reports.flushes import Flush, Step
from lazy_tensor.reports.places import code_at, in_short, shortened

if TYPE_CHECKING:
    from lazy_tensor.dispatch.tiering.sites import Compared

MOST = 3
"""Most pieces of advice in a report."""
WORTH_SAYING = 0.02
"""Smallest share of time that is worth a sentence."""
AGAIN = 3
"""How often something must be seen to count as what the program does at every step."""
GAINS_BY_REPLAY = 0.9
"""`replay` is advised if a block's plan takes less than this share of the block's time. Below that
gain, the rules that `replay` asks a program to follow aren't worth it."""
FLUSH_S = 20e-6
"""Seconds that a flush of one op takes on the host: see `benches/results/fixed.md`."""
READS = frozenset({
    ".item()", ".numpy()", ".tolist()", "a tensor as an index", "a value is read", "bool()",
    "complex()", "float()", "format()", "int()", "print()",
})  # fmt: skip
"""Causes of flushes that a program can move to another place, or have less often."""
SIZED_BY_VALUES = frozenset({"indexing", "masked_select()", "nonzero()", "unique()"})
"""Causes of flushes by ops whose output size depends on values."""
REMEDIES = {
    "size of dim": "pad to a few sizes (multiples of 64, say), so that fewer are ever new",
    "where it ended before": "nothing needs to change if this is a program's first steps",
    "came before": "nothing needs to change if these are first steps; each way that a branch takes "
    "is recorded once, and on values torch.where does without one",
    "went": "a number in arithmetic becomes an input by itself the second time; one that chooses a "
    "shape or a branch can't",
}
"""What to do about a program that is new at each step, by a phrase in the sentence that says what
was new (see `recompile_reason`). The first phrase that occurs counts."""


@dataclass(frozen=True, slots=True)
class Advice:
    """A change that would help, and the share of the program's time that it saves at most."""

    share: float
    text: str

    def __str__(self) -> str:
        return f"up to {self.share:.0%} of the time: {self.text}"


def advice_on(
    flushes: Sequence[Flush],
    *,
    blocks: Sequence[Compared],
    regions: Mapping[str, tuple[int, float]],
    kernels: Mapping[str, int],
    replays: bool,
) -> list[Advice]:
    """At most three changes, the largest first.

    `regions` has number and seconds of regions by outcome (see `stats.OUTCOMES`), `kernels` counts
    segments by status, `replays` says whether `replay` is in use.
    """
    region_s = sum(seconds for _, seconds in regions.values())
    found = [
        *_kernels_under_way(regions, region_s, kernels),
        *(() if replays else _blocks_by_replay(blocks)),
    ]
    total_s = sum(flush.seconds + flush.gap_s for flush in flushes)
    if total_s:
        # Flushes tell only of the time in which the program was recorded, so advice that is about
        # them is scaled down to that share. Reads are not: they may be why little is recorded.
        found += _reads(flushes, total_s)
        in_flushes = [
            *_what_is_new(flushes, total_s),
            *_without_kernels(flushes, total_s),
            *(() if replays or blocks else _recording(flushes, total_s)),
        ]
        recorded = regions.get(RECORDED, (0, 0.0))[1] / region_s if region_s else 1.0
        found += [Advice(one.share * recorded, one.text) for one in in_flushes]
    worth = [one for one in found if one.share >= WORTH_SAYING]
    return sorted(worth, key=lambda one: one.share, reverse=True)[:MOST]


def _kernels_under_way(
    regions: Mapping[str, tuple[int, float]], region_s: float, kernels: Mapping[str, int]
) -> Iterator[Advice]:
    """Regions that ran as in eager while kernels are being built: later runs gain by themselves."""
    n_left = kernels.get("queued", 0) + kernels.get("compiling", 0)
    if n_left and KERNELS in regions:
        yield Advice(
            regions[KERNELS][1] / region_s,
            f"kernels were being built, and {n_left} still are. Nothing needs to change: the next "
            "run finds them on disk; `python -m lazy_tensor cache warm` builds them ahead",
        )


def _blocks_by_replay(blocks: Sequence[Compared]) -> Iterator[Advice]:
    """Blocks that take longer than their plans: a replayed call runs the plan alone, without
    recording and without the program's Python."""
    for block in blocks:
        # the faster way runs already, so the gain is over that one
        took_s = min(block.recorded_s, block.bypassed_s)
        if not block.is_parted and 0 < block.ran_s < GAINS_BY_REPLAY * took_s:
            yield Advice(
                (took_s - block.ran_s) / took_s,
                f"a step at {shortened([block.where])} takes {took_s * 1e3:.2f} ms, its plan alone "
                f"{block.ran_s * 1e3:.2f} ms. `lazy_tensor.replay` runs that, if each step does "
                "the same",
            )


def _reads(flushes: Sequence[Flush], total_s: float) -> Iterator[Advice]:
    """Values that are read in the middle of a step: ops before and after can't share kernels."""
    # each flush with the next one: without the read in between they would be one
    followed: dict[tuple[str, str], list[tuple[Flush, Flush | None]]] = defaultdict(list)
    for flush, behind in zip(flushes, [*flushes[1:], None], strict=True):
        followed[flush.cause, flush.where].append((flush, behind))
    if len(followed) < 2:
        # one flush a step, which every program needs
        return
    often = {place: pairs for place, pairs in followed.items() if len(pairs) >= AGAIN}
    checked: dict[str, float] = {}
    for (cause, where), pairs in often.items():
        share = sum(_split_s(*pair) for pair in pairs) / total_s
        if cause == DISTRIBUTION_CHECK:
            checked[where] = share
        elif cause in READS:
            yield Advice(
                share,
                f"{code_at(where)} needs values ({cause}) at every step, which parts what comes "
                "before it from what comes after. Move it to the end of the step, or behind "
                "`if step % 10 == 0`",
            )
        elif cause in SIZED_BY_VALUES:
            yield Advice(
                share,
                f"the size of what {code_at(where)} gives depends on values, which parts what "
                "comes before it from what comes after. Keep the size: `torch.where`, or a sum "
                "over the mask",
            )
    if checked:
        yield Advice(
            sum(checked.values()),
            f"torch.distributions checks values at {shortened(checked)}, which "
            "parts what comes before from what comes after. "
            "`torch.distributions.Distribution.set_default_validate_args(False)` leaves that out",
        )


def _split_s(flush: Flush, behind: Flush | None) -> float:
    """The most that it costs that a flush is apart from the one behind it, in seconds.

    On the CPU: a flush's time on the host, and writing and reading again the bytes that could have
    stayed in a kernel. On a GPU: the whole flush, as the host waits for the device.
    """
    if any(step.device != "cpu" for step in flush.steps):
        return flush.ran_s
    # no more than what the one writes, or what the other reads, can go from the one to the other
    given = sum(step.n_bytes_given for step in _segments(flush))
    taken = sum(step.n_bytes - step.n_bytes_given for step in _segments(behind))
    return min(flush.ran_s, FLUSH_S + 2 * min(given, taken) / limit_bytes_per_s("cpu"))


def _segments(flush: Flush | None) -> list[Step]:
    return [] if flush is None else [step for step in flush.steps if step.is_segment]


def _what_is_new(flushes: Sequence[Flush], total_s: float) -> Iterator[Advice]:
    """Programs that are new at many flushes: what recording and planning them anew took."""
    new = [flush for flush in flushes if flush.miss]
    if len(new) < AGAIN:
        return
    spent_s = sum(flush.grown_s + (flush.plan_s if "new" in flush.how else 0.0) for flush in new)
    text = (
        f"{len(new)} of {len(flushes)} flushes were of a program not seen before, and had to be "
        "recorded and planned anew"
    )
    difference = latest_difference(flush.miss for flush in new)
    if difference is not None:
        remedies = [remedy for mark, remedy in REMEDIES.items() if mark in difference]
        text = "; ".join((f"{text}: {in_short(difference)}", *remedies[:1]))
    yield Advice(spent_s / total_s, text)


def _recording(flushes: Sequence[Flush], total_s: float) -> Iterator[Advice]:
    """The same as `_blocks_by_replay` where no block was timed, as with `record="always"`."""
    settled = [flush for flush in flushes if not flush.miss and "known" in flush.how]
    reads = any(flush.cause in READS | SIZED_BY_VALUES for flush in flushes)
    if len(settled) >= AGAIN and not reads:
        yield Advice(
            sum(flush.gap_s for flush in settled) / total_s,
            "recording calls that were seen before, and the program's own Python around them; "
            "`lazy_tensor.replay` on the loop's body runs its plan without either",
        )


def _without_kernels(flushes: Sequence[Flush], total_s: float) -> Iterator[Advice]:
    """Flushes whose ops could be fused, but for the options of the program."""
    seconds = [
        flush.ran_s
        for flush in flushes
        if sum(step.reason == NOTHING_FUSED for step in flush.steps) > 1
    ]
    if seconds:
        share = sum(seconds) / total_s
        yield Advice(share, 'running op by op, as compile="off" or backend="aten" says')
