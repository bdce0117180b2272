"""The tutorial is a notebook that runs, and prints what it shows where that doesn't vary."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest

nbformat = pytest.importorskip("nbformat")
nbclient = pytest.importorskip("nbclient")

TUTORIAL = Path(__file__).parents[2] / "docs" / "tutorial.ipynb"


def printed_by(cells: list[Any]) -> list[str]:
    """What each cell of code printed; "" of one whose output varies."""
    return [
        "" if "varies" in cell.metadata.get("tags", ()) else
        "".join(output.get("text", "") for output in cell.outputs)
        for cell in cells if cell.cell_type == "code"
    ]  # fmt: skip


@pytest.mark.slow
def test_the_tutorial_prints_what_it_shows(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("IPYTHONDIR", str(tmp_path))
    notebook = nbformat.read(TUTORIAL, as_version=4)
    shown = printed_by(notebook.cells)
    nbclient.NotebookClient(notebook, timeout=300, kernel_name="python3").execute()
    assert printed_by(notebook.cells) == shown
    assert any("segment" in text for text in shown), "it has its outputs"
    assert not any(os.sep + "ipykernel" in text for text in shown), "cells go by their numbers"
