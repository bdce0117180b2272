"""The markdown pages that benchmarks write."""

from __future__ import annotations

import results_table
import torch


def test_page_states_its_circumstances_and_has_one_table():
    page = results_table.page("Title", ["", "eager"], [["step", "1 ms"]])
    lines = page.splitlines()
    assert lines[0] == "# Title"
    assert f"- torch {torch.__version__}" in page
    assert all(f"- {name}: " in page for name in ("device", "commit", "command"))
    assert lines[-3:] == ["|  | eager |", "| --- | --- |", "| step | 1 ms |"]
