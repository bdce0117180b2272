"""The demo's closing table as plain text cells. In: histories, probes, counters. Out: rows."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from lazy_tensor.cli.probe import Probe
from lazy_tensor.cli.race import History
from lazy_tensor.cli.timings import Spread

Row = tuple[str, ...]

COUNTERS = {
    "ops": "ops recorded",
    "flushes": "flushes",
    "segments": "segments run",
    "compiled": "kernels compiled",
    "loaded": "kernels from disk",
    "reused": "kernels reused",
    "compile_s": "seconds compiling",
}


def rows(
    histories: Mapping[str, History], probes: Mapping[str, Probe], tokens_per_step: int
) -> list[Row]:
    """A label and a cell for each side, in the order of `histories`; ratios are to the first.

    Warm steps are those of the last half.
    """
    reference, table = next(iter(histories)), list(histories.values())
    warm = [history.warm() for history in table]
    peaks = [probes[name].peak_bytes if name in probes else None for name in histories]
    return [
        ("loss, first to last", *(f"{h.losses[0]:.4f} to {h.losses[-1]:.4f}" for h in table)),
        (f"losses against {reference}", "", *(equality(table[0], h) for h in table[1:])),
        ("first step", *compared([h.seconds[0] for h in table], seconds_text)),
        ("median warm step", *compared([w.median_s for w in warm], seconds_text)),
        ("p10 to p90", *map(range_text, warm)),
        ("tokens/s, warm", *(f"{tokens_per_step / w.median_s:,.0f}" for w in warm)),
        ("peak memory", *compared(peaks, bytes_text)),
    ]


def counter_rows(stats: Mapping[str, Any]) -> list[Row]:
    """A label and a number for each counter of `lazy_tensor.stats()` that the table shows."""
    return [
        (label, f"{stats[name]:,.1f}" if name.endswith("_s") else f"{stats[name]:,}")
        for name, label in COUNTERS.items()
    ]


def equality(reference: History, other: History) -> str:
    difference = reference.relative_difference(other)
    if difference == 0.0:
        return "bit-equal"
    return "not finite" if math.isinf(difference) else f"within {difference:.1e}"


def compared(values: Sequence[float | None], text: Callable[[float], str]) -> list[str]:
    """Each value as text, those after the first with their ratio to it; None is a dash."""
    return [with_ratio(v, values[0] if i else None, text) for i, v in enumerate(values)]


def with_ratio(value: float | None, reference: float | None, text: Callable[[float], str]) -> str:
    if value is None:
        return "–"
    return f"{text(value)}  {value / reference:.2f}×" if reference else text(value)


def range_text(times: Spread) -> str:
    return f"{times.p10_s * 1e3:.1f}–{times.p90_s * 1e3:.1f} ms"


def seconds_text(seconds: float) -> str:
    return f"{seconds:.2f} s" if seconds >= 1 else f"{seconds * 1e3:.1f} ms"


def bytes_text(n_bytes: float) -> str:
    return f"{n_bytes / 2**20:,.0f} MiB"
