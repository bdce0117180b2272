"""`make gpu` on the stand-in, with three of its steps: each writes its result when it ends."""

import sys
from dataclasses import replace

import gpu
import gpu_programs
import pytest
import stand_in

pytestmark = pytest.mark.skipif(
    not stand_in.is_loaded(), reason="needs python tests/device/stand_in.py pytest ..."
)


def test_a_page_is_written_as_its_steps_end(tmp_path, capsys, monkeypatch):
    names = ("doctor", "copy", "pointwise 64")
    # All the time that a slow machine takes, and one side of the program alone.
    chosen = [replace(step, limit_s=600) for step in gpu.steps() if step.name in names]
    chosen[-1] = replace(chosen[-1], command=(*chosen[-1].command, "--sides", "eager"))
    monkeypatch.setattr(gpu, "steps", lambda: chosen)
    gpu.main(["--out", str(tmp_path)])
    told = capsys.readouterr().out
    assert [name for name in names if f"  {name}: " in told] == [*names]
    page = (tmp_path / "gpu.md").read_text()
    assert "- doctor: ok" in page
    assert "- copy: ok, bytes_per_s: " in page
    row = next(line for line in page.splitlines() if line.startswith("| pointwise 64 | "))
    assert " ms | " in row
    assert "a stand-in for an H200" in (tmp_path / "doctor.txt").read_text()


def test_a_step_that_takes_too_long_is_cut_short(tmp_path):
    printing = 'print(\'{"side": "eager"}\', flush=True); import time; time.sleep(600)'
    step = gpu.Step("endless", (sys.executable, "-c", printing), 2, 0)
    page = gpu.Page(tmp_path)
    gpu.run(step, page, 600)
    assert page.lines[0].startswith("endless: cut short")
    assert "endless" in (tmp_path / "gpu.md").read_text()


def test_steps_are_named_once():
    names = [step.name for step in gpu.steps()]
    assert len(names) == len(set(names))
    assert set(gpu.PROGRAMS) < set(names)


def test_the_page_has_all_programs_and_sides():
    """It names them itself: it is written where torch can't be imported, too."""
    assert set(gpu.PROGRAMS) == set(gpu_programs.PROGRAMS)
    assert gpu.SIDES == gpu_programs.SIDES
