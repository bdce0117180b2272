"""`python -m lazy_tensor demo`, whole."""

from __future__ import annotations

import os
import signal
import subprocess
import sys

import pytest

from lazy_tensor.cli import race
from lazy_tensor.cli.main import main

TINY = ["demo", "--model", "tiny", "--batch", "2"]


@pytest.fixture
def out(tmp_path):
    return tmp_path / "out.png"


@pytest.mark.parametrize("how", [[], ["--wrap"], ["--dropout", "0.1"]])
def test_losses_are_bit_equal_op_by_op(how, out, capsys):
    arguments = [*TINY, "--steps", "3", "--compile", "off", "--no-memory", "--out", str(out), *how]
    assert main(arguments) == 0
    table = capsys.readouterr().out
    assert "bit-equal" in table
    assert "median warm step" in table
    assert out.stat().st_size > 0


def test_table_has_memory_and_counters(out, capsys):
    assert main([*TINY, "--steps", "4", "--compile", "blocking", "--out", str(out)]) == 0
    table = {
        cells[1].strip(): cells[2:]
        for line in capsys.readouterr().out.splitlines()
        if len(cells := line.split("│")) > 2
    }
    assert "MiB" in table["peak memory"][1]
    assert int(table["segments run"][1].replace(",", "")) > 0


def test_interrupt_between_rounds_still_shows_the_steps_done(out, capsys, monkeypatch):
    run_round = race.Race.run_round

    def run_two(self, *batch):
        if self.n_rounds == 2:
            raise KeyboardInterrupt
        run_round(self, *batch)

    monkeypatch.setattr(race.Race, "run_round", run_two)
    assert main([*TINY, "--steps", "9", "--compile", "off", "--out", str(out)]) == 130
    assert "losses against eager" in capsys.readouterr().out
    assert out.exists()


def test_interrupt_before_the_first_round_ends_quietly(out, capsys, monkeypatch):
    def interrupted(self, *batch):
        raise KeyboardInterrupt

    monkeypatch.setattr(race.Race, "run_round", interrupted)
    assert main([*TINY, "--out", str(out)]) == 130
    assert capsys.readouterr().err == ""


def test_ctrl_c_ends_a_running_process_with_the_table(out):
    command = [sys.executable, "-u", "-m", "lazy_tensor", *TINY, "--steps", "400"]
    with subprocess.Popen(
        [*command, "--compile", "off", "--out", str(out)],
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    ) as process:
        assert process.stdout is not None
        while not process.stdout.readline().startswith("step "):
            assert process.poll() is None, "ended before its first line"
        process.send_signal(signal.SIGINT)
        shown, errors = process.communicate(timeout=60)
    assert process.returncode == 130, errors
    assert "median warm step" in shown
    assert "Traceback" not in errors


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--text", "nowhere.txt"], "can't read nowhere.txt: No such file or directory"),
        (["--text", "."], "can't read .: Is a directory"),
        (["--backend", "nope"], "backend 'nope' is not one of auto, "),
        (["--device", "nope"], "--device nope can't be used: "),
        (["--out", "nowhere/out.png"], "--out nowhere/out.png: can't be written"),
    ],
)
def test_impossible_request_gets_one_line(arguments, message, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    assert main([*TINY, *arguments]) == 2
    shown = capsys.readouterr()
    assert shown.err.startswith(f"lazy_tensor demo: {message}")
    assert shown.err.count("\n") == 1
    assert shown.out == ""


@pytest.mark.parametrize("arguments", [["--steps", "0"], ["--dropout", "1"], ["--model", "huge"]])
def test_bad_value_is_refused_by_the_parser(arguments, capsys):
    with pytest.raises(SystemExit, match="2"):
        main([*TINY, *arguments])
    assert arguments[1] in capsys.readouterr().err


def test_missing_extra_is_named(monkeypatch, capsys):
    monkeypatch.delitem(sys.modules, "lazy_tensor.cli.screen", raising=False)
    monkeypatch.setitem(sys.modules, "rich.console", None)
    assert main(TINY) == 2
    assert "pip install 'lazy-tensor[demo]'" in capsys.readouterr().err
