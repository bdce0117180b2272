"""The changes to a program that would help most, each with the share of time that it is about.

In: flushes looked at, what ran at once, how long kernels were waited for. Out: at most three
sentences. The shares are measured over the time from the first of these flushes to the last.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from lazy_tensor.dispatch.trie.recompile_reason import latest_difference
from lazy_tensor.reports.flushes import Flush, code_at

MOST = 3
WORTH_SAYING = 0.02
"""Smallest share of time that is worth a sentence."""
AGAIN = 3
"""Times that something is seen before it counts as what the program does at every step."""
BOUNDS = frozenset({
    "cache_clear()", "configure()", "exit", "explain()", "flush()", "max_pending_bytes",
    "max_segment_ops", "nothing repeats", "recording doesn't pay", "segment closed",
})  # fmt: skip
"""Causes of flushes that no value was needed for."""
LENGTHS = "pad to a few sizes (multiples of 64, say), so that fewer are ever new"
REMEDIES = {
    "size of dim": LENGTHS,
    "where it ended before": "nothing needs to change if this is a program's first steps",
    "came before": "each way that a branch takes is recorded once; on values, use torch.where",
    "went": "a number in arithmetic becomes an input by itself the second time; one that chooses a "
    "shape or a branch can't",
}


@dataclass(frozen=True, slots=True)
class Advice:
    """A change that would help, and the share of the time that it is about."""

    share: float
    text: str

    def __str__(self) -> str:
        return f"{self.share:.0%} of the time: {self.text}"


def advice_on(
    flushes: Sequence[Flush], *, ran_at_once: dict[str, float], compiles: bool, replays: bool
) -> list[Advice]:
    """At most three changes, the largest first. `ran_at_once` are the shares of calls that could
    not be recorded; `compiles` says whether segments get kernels, `replays` whether `replay`
    is in use."""
    total_s = sum(flush.seconds + (flush.gap_s or 0.0) for flush in flushes)
    if not total_s:
        return []
    found = [
        *_flushes_within_steps(flushes, total_s),
        *_what_is_new(flushes, total_s),
        *_recording(flushes, total_s, replays),
        *_without_kernels(flushes, total_s, compiles),
        *(
            Advice(share, f"{call} could not be recorded and ran at once")
            for call, share in ran_at_once.items()
        ),
    ]
    worth = [one for one in found if one.share >= WORTH_SAYING]
    return sorted(worth, key=lambda one: one.share, reverse=True)[:MOST]


def _flushes_within_steps(flushes: Sequence[Flush], total_s: float) -> Iterator[Advice]:
    """Values that are read between others: what is pending on both sides can't share kernels."""
    of_place: dict[tuple[str, str], list[Flush]] = defaultdict(list)
    for flush in flushes:
        of_place[flush.cause, flush.where].append(flush)
    often = {place: several for place, several in of_place.items() if len(several) >= AGAIN}
    if len(often) < 2:
        return  # one flush a step: what is pending has to run some time
    for (cause, where), several in often.items():
        if cause not in BOUNDS and not cause.startswith("replay"):
            yield Advice(
                sum(flush.ran_s for flush in several) / total_s,
                f"{code_at(where)} needs values ({cause}) at every step; what comes before and "
                "after it can't be fused. Move it to the end of the step, or behind "
                "`if step % 10 == 0`",
            )


def _what_is_new(flushes: Sequence[Flush], total_s: float) -> Iterator[Advice]:
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
        text = "; ".join((f"{text}: {difference}", *remedies[:1]))
    yield Advice(spent_s / total_s, text)


def _recording(flushes: Sequence[Flush], total_s: float, replays: bool) -> Iterator[Advice]:
    settled = [
        flush for flush in flushes if not flush.miss and "known" in flush.how and flush.gap_s
    ]
    if replays or len(settled) < AGAIN:
        return
    share = sum(flush.gap_s or 0.0 for flush in settled) / total_s
    yield Advice(
        share,
        "recording calls that were seen before, and the program's own Python around them; "
        "`lazy_tensor.replay` on the loop's body runs its plan without either",
    )


def _without_kernels(flushes: Sequence[Flush], total_s: float, compiles: bool) -> Iterator[Advice]:
    if compiles:
        return
    fusible = [f for f in flushes if "known" in f.how and len(f.steps) > 1]
    share = sum(flush.seconds for flush in fusible) / total_s
    if fusible:
        yield Advice(share, 'running op by op, as compile="off" or backend="aten" says')
