"""The commands that run a user's program, and those on the kernels that are kept."""

from __future__ import annotations

import subprocess
import sys

import pytest

from lazy_tensor.cli.main import main
from lazy_tensor.kernels import cpp
from lazy_tensor.kernels.disk import Disk, key_of

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
    assert f"{program}:9: aten._local_scalar_dense.default" in told
    assert page.read_text().startswith("<!doctype html>")


def test_the_program_decides_the_status(program, tmp_path):
    assert command("explain", program, "fail", cache_dir=tmp_path / "cache")[0] == 3


def test_what_can_not_be_run_is_said(program, capsys):
    assert main(["explain", "no-such-file.py"]) == 2
    assert main(["explain", "--out", "report.txt", str(program)]) == 2
    assert main(["bench", "no-such-bench"]) == 2
    told = capsys.readouterr().err
    assert "there is no file 'no-such-file.py'" in told
    assert "must end in .html" in told
    assert "there is no bench_no-such-bench.py; there are" in told


def test_the_cache_is_warmed_listed_and_cleared(program, tmp_path):
    folder = tmp_path / "cache"
    status, told = command("cache", "warm", program, cache_dir=folder)
    assert (status, "total 172" in told) == (0, True), told
    # the kernel, and what keeps memory where that wasn't compiled with the package
    assert f"{1 if cpp.POOL.built() else 2} artifacts more" in told
    Disk(folder).put(key_of("mine"), b"kernel")
    status, told = command("cache", "list", cache_dir=folder)
    assert key_of("mine")[:12] in told
    status, told = command("cache", "clear", cache_dir=folder)
    assert "deleted" in told
    assert "0 artifacts, 0 B" in command("cache", "list", cache_dir=folder)[1]
