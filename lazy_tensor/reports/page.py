"""A report as one HTML page that opens offline.

In: a report. Out: `page.html` with the report's data as JSON inside it; the page's script draws it.
"""

from __future__ import annotations

import html
import json
from importlib.resources import files
from typing import TYPE_CHECKING, Any

import torch

from lazy_tensor.reports.bandwidth import share_of_bandwidth
from lazy_tensor.reports.flushes import COPIED, Flush, Step, alike, amount
from lazy_tensor.reports.places import with_cells
from lazy_tensor.reports.text import headline

if TYPE_CHECKING:
    from lazy_tensor.report import Report

HEIGHT_PX = 720


def page_of(report: Report) -> str:
    """The whole page, which needs no other file."""
    flushes = report.flushes
    data = {
        "summary": f"{len(flushes)} flushes, torch {torch.__version__}, "
        f"{torch.get_num_threads()} threads",
        "headline": [with_cells(line) for _, line in headline(report)],
        "advice": [with_cells(str(one)) for one in report.advice],
        "alike": alike(flushes),
        "flushes": [_flush(flush) for flush in flushes],
        "builds": [build._asdict() for build in report.builds],
        "text": str(report),
    }
    template = (files("lazy_tensor.reports") / "page.html").read_text(encoding="utf-8")
    # "</script>" in a file's name would end the page's script
    return template.replace("{data}", json.dumps(data).replace("<", "\\u003c"))


def framed(page: str) -> str:
    """The page in an iframe, for notebooks: its styles and scripts stay apart from theirs."""
    return (
        f'<iframe srcdoc="{html.escape(page)}" style="width: 100%; height: {HEIGHT_PX}px; '
        'border: 0"></iframe>'
    )


def _flush(flush: Flush) -> dict[str, Any]:
    # The picture leaves views out: they do nothing. So steps get other numbers, and a step that
    # uses a view is joined to the step that made the view's base.
    kept = [i for i, step in enumerate(flush.steps) if step.reason != "a view"]
    number = {i: n for n, i in enumerate(kept)}
    return {
        **{name: getattr(flush, name) for name in COPIED},
        "where": with_cells(flush.where),
        "miss": with_cells(flush.miss),
        "how": flush.how,
        "peak": amount(flush.peak_bytes) if flush.peak_bytes else "",
        "saved": amount(flush.n_bytes_saved) if flush.n_bytes_saved else "",
        "steps": [
            _step(flush.steps[i], sorted({number[j] for j in _makers(flush.steps, i, number)}))
            for i in kept
        ],
    }


def _makers(steps: tuple[Step, ...], i: int, kept: dict[int, int]) -> set[int]:
    """The kept steps whose results step `i` uses, directly or through views."""
    found: set[int] = set()
    left = list(steps[i].needs)
    while left:
        j = left.pop()
        if j in kept:
            found.add(j)
        else:
            left += steps[j].needs
    return found


def _step(step: Step, needs: list[int]) -> dict[str, Any]:
    share = share_of_bandwidth(step)
    return {
        "is_segment": step.is_segment,
        "title": step.title,
        "lines": step.lines,
        "status": step.status,
        "reason": step.reason,
        "ops": [[op.name, with_cells(op.where), op.gives] for op in step.ops],
        "takes": step.takes,
        "gives": step.gives,
        "moved": f"{amount(step.n_bytes)} read and written" if step.n_bytes else "",
        "bandwidth": "" if share is None else f"{share:.0%} of what memory gives",
        "saved": amount(step.n_bytes_saved) if step.n_bytes_saved else "",
        "seconds": step.seconds,
        "needs": needs,
    }
