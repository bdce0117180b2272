"""The commands that run a user's program, and those on the kernels that are kept."""

from __future__ import annotations

import contextlib
import os
import re
import subprocess
import sys

import pytest

import lazy_tensor
from lazy_tensor.cli.main import main
from lazy_tensor.kernels.disk import Disk, key_of
from lazy_tensor.kernels.extension import cpp

PROGRAM = """
import sys
import torch
from helper import width
assert __name__ == "__main__"
x = torch.ones(width, width)
for _ in range(3):
    total = (x.sin() * 2 + 1).sum()
print("total", round(total.item()), *sys.argv[1:])
if "fail" in sys.argv:
    sys.exit(3)
"""


@pytest.fixture
def program(tmp_path):
    (tmp_path / "program.py").write_text(PROGRAM)
    (tmp_path / "helper.py").write_text("width = 8\n")
    return tmp_path / "program.py"


def command(*arguments, cache_dir):
    answer = subprocess.run(
        [sys.executable, "-m", "lazy_tensor", *map(str, arguments)],
        env={
            "LAZY_TENSOR_CACHE_DIR": str(cache_dir),
            "LAZY_TENSOR_HITS": "python",  # to compile those takes ten seconds
            "PATH": "/usr/bin:/bin",
            "COLUMNS": "200",
        },
        capture_output=True,
        text=True,
        check=False,
    )
    return answer.returncode, answer.stdout + answer.stderr


def test_a_program_is_explained(program, tmp_path):
    page = tmp_path / "report.html"
    status, told = command("explain", "--out", page, program, "-v", cache_dir=tmp_path / "cache")
    assert (status, "total 172 -v" in told) == (0, True), told
    assert f"{program}:9: .item(): " in told
    assert page.read_text().startswith("<!doctype html>")


def test_out_of_the_program_itself_is_let_be(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "writes.py").write_text(
        "import pathlib, sys\npathlib.Path(sys.argv[2]).write_text('mine')\n"
    )
    assert main(["explain", "writes.py", "--out", "r.html"]) == 0
    assert capsys.readouterr().err == ""
    assert main(["explain", "--out", "report.html", "writes.py", "--out", "r.html"]) == 0
    assert capsys.readouterr().err == ""
    assert (tmp_path / "r.html").read_text() == "mine"
    assert (tmp_path / "report.html").exists()


@pytest.mark.parametrize("arguments", [["doctor"], ["cache", "list"]], ids=str)
def test_commands_end_quietly_when_nobody_reads(arguments, monkeypatch, capfd):
    reads, writes = os.pipe()
    os.close(reads)
    with os.fdopen(writes, "w") as stdout:
        monkeypatch.setattr(sys, "stdout", stdout)
        assert main(arguments) == 141
        print("the flush at exit says nothing either", file=stdout)
    assert capfd.readouterr().err == ""


def test_the_page_is_written_when_nobody_reads(program, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    program.write_text("import torch\ntorch.ones(2).sum().item()\n")
    reads, writes = os.pipe()
    os.close(reads)
    with os.fdopen(writes, "w") as stdout:
        monkeypatch.setattr(sys, "stdout", stdout)
        with contextlib.suppress(SystemExit):  # which rich raises
            main(["explain", "--out", "r.html", "program.py"])
    assert (tmp_path / "r.html").exists()


def test_a_closed_pipe_of_the_program_is_no_quiet_end(tmp_path, capfd):
    (tmp_path / "pipes.py").write_text(
        "import os\nr, w = os.pipe()\nos.close(r)\nos.write(w, b'x')\n"
    )
    with pytest.raises(BrokenPipeError):
        main(["explain", str(tmp_path / "pipes.py")])


def test_the_program_decides_the_status(program, tmp_path):
    assert command("explain", program, "fail", cache_dir=tmp_path / "cache")[0] == 3


@pytest.mark.parametrize(
    ("error", "status"), [("ValueError('no such batch')", 1), ("KeyboardInterrupt", 130)]
)
def test_a_program_that_raises_is_reported_on(program, capfd, error, status):
    program.write_text(PROGRAM.replace("sys.exit(3)", f"raise {error}"))
    assert main(["explain", str(program), "fail"]) == status
    shown = capfd.readouterr()
    assert ("ValueError: no such batch" in shown.err) == (status == 1)
    assert f"{program}:9: .item(): " in shown.out


def test_lines_are_not_broken_where_nobody_sees_them(program, capsys):
    lazy_tensor.reset_stats()
    assert main(["explain", str(program)]) == 0
    (line,) = [it for it in capsys.readouterr().out.splitlines() if ":9: .item(): " in it]
    assert "ops" in line
    assert " ms" in line


def test_what_can_not_be_run_is_said(program, capsys):
    assert main(["explain", "no-such-file.py"]) == 2
    assert main(["explain", "--out", "report.txt", str(program)]) == 2
    told = capsys.readouterr().err
    assert "there is no file 'no-such-file.py'" in told
    assert "must end in .html" in told


@pytest.mark.slow
def test_the_cache_is_warmed_listed_and_cleared(program, tmp_path):
    folder = tmp_path / "cache"
    status, told = command("cache", "warm", program, cache_dir=folder)
    assert (status, "total 172" in told) == (0, True), told
    # the kernel, and the C++ that wasn't compiled with the package
    n_compiled = int(cpp.PROGRAM.built() is None)
    assert f"{1 + n_compiled} artifacts more" in told
    Disk(folder).put(key_of("mine"), b"kernel")
    status, told = command("cache", "list", cache_dir=folder)
    assert key_of("mine")[:12] in told
    assert re.search(r"used just now +inductor: .*mul", told), told
    status, told = command("cache", "clear", cache_dir=folder)
    assert "deleted" in told
    assert "0 artifacts, 0 B" in command("cache", "list", cache_dir=folder)[1]
