"""The demo, whole."""

from __future__ import annotations

import os
import signal
import subprocess
import sys

import pytest

from lazy_tensor.examples.race import __main__ as demo
from lazy_tensor.examples.race.__main__ import main
from lazy_tensor.examples.race.scenes import SCENES

SHORT = ["--scene", "monte_carlo", "--seconds", "0.1"]
COMMAND = [sys.executable, "-u", "-m", "lazy_tensor.examples.race"]


@pytest.fixture
def out(tmp_path):
    return tmp_path / "out.png"


@pytest.mark.parametrize("scene", SCENES)
def test_sides_of_a_scene_agree(scene, out, capfd):
    sides = ["eager", "lazy", "replay"]
    assert main(["--scene", scene, "--seconds", "0.5", "--out", str(out), "--sides", *sides]) == 0
    shown = capfd.readouterr()
    rows = {row.split()[0]: row.split() for row in shown.out.splitlines() if row.split()}
    for side in sides[1:]:
        differs = rows[side][-1]  # kernels may be there already, and round in their own way
        assert differs == "none" or float(differs) < 1e-5, shown.out
    assert shown.err == ""
    assert out.read_bytes().startswith(b"\x89PNG")


def test_no_compile_leaves_it_out(out, capfd):
    arguments = ["--scene", "gray_scott", "--seconds", "0.1", "--no-compile"]
    assert main([*arguments, "--out", str(out)]) == 0
    shown = capfd.readouterr().out
    assert "lazy: " in shown
    assert "torch.compile" not in shown


def test_table_grows_on_a_terminal(out):
    done = subprocess.run(
        [*COMMAND, *SHORT, "--out", str(out)], env={**os.environ, "FORCE_COLOR": "1"},
        capture_output=True, text=True, check=True,
    )  # fmt: skip
    assert "lazy …" in done.stdout
    assert "\x1b[2K" in done.stdout  # lines drawn anew
    assert "steps in" not in done.stdout


def test_ctrl_c_ends_with_the_table_so_far(out):
    arguments = ["--scene", "gpt", "--seconds", "3", "--out", str(out)]
    with subprocess.Popen(
        [*COMMAND, *arguments], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
        start_new_session=True,
    ) as process:  # fmt: skip
        assert process.stdout is not None
        while not process.stdout.readline().startswith("gpt, eager: "):
            assert process.poll() is None, "ended before its first turn did"
        os.killpg(process.pid, signal.SIGINT)  # as a terminal sends it
        shown, errors = process.communicate(timeout=60)
    assert process.returncode == 130, errors
    assert "settled" in shown
    assert errors == ""
    assert out.exists()


def test_side_that_fails_leaves_the_others(out, capfd, monkeypatch):
    monkeypatch.setattr(demo, "sides_of", lambda scene, args: ["eager", "nobody"])
    assert main([*SHORT, "--out", str(out)]) == 0
    shown = capfd.readouterr().out
    assert "monte_carlo, nobody: KeyError: 'nobody'" in shown
    assert "failed" in shown


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--out", "nowhere/out.png"], "--out nowhere/out.png: can't be written"),
        (["--out", "out.txt"], "--out out.txt: the name must end in one of "),
        (["--sides", "torch.compile", "--no-compile"], "--no-compile leaves no side to run"),
    ],
)
def test_impossible_request_gets_one_line(arguments, message, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    assert main([*SHORT, *arguments]) == 2
    shown = capsys.readouterr()
    assert shown.err.startswith(f"race: {message}")
    assert shown.err.count("\n") == 1
    assert shown.out == ""


@pytest.mark.parametrize("arguments", [["--seconds", "0"], ["--scene", "no"], ["--sides", "no"]])
def test_bad_value_is_refused_by_the_parser(arguments, capsys):
    with pytest.raises(SystemExit, match="2"):
        main([*SHORT, *arguments])
    assert arguments[1] in capsys.readouterr().err


def test_missing_extra_is_named(monkeypatch, capsys):
    monkeypatch.delitem(sys.modules, "lazy_tensor.examples.race.screen", raising=False)
    monkeypatch.setitem(sys.modules, "rich.console", None)
    assert main(SHORT) == 2
    assert "pip install 'lazy-tensor[demo]'" in capsys.readouterr().err
