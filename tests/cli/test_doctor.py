"""`python -m lazy_tensor doctor`."""

from __future__ import annotations

import os
import subprocess
import sys

import torch

from lazy_tensor.cli import doctor
from lazy_tensor.cli.main import main
from lazy_tensor.dispatch.settings import NAMES
from lazy_tensor.kernels import available_backends


def test_doctor_shows_versions_backends_and_every_setting(capsys):
    assert main(["doctor"]) == 0
    shown = capsys.readouterr().out
    assert torch.__version__ in shown
    words = shown.split()
    assert set(NAMES) <= set(words)
    assert set(available_backends("cpu")) <= set(words)


def test_reason_of_an_unavailable_backend_is_shown(monkeypatch):
    monkeypatch.setattr(doctor, "available_backends", lambda device_type: {"x": "it is broken"})
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert list(doctor.backends()) == [("x on cpu", "it is broken")]


def test_missing_compiler_is_said():
    assert doctor.compiler_version("no-such-compiler").startswith("no-such-compiler not found")


def test_setting_from_the_environment_names_its_variable(tmp_path):
    answer = subprocess.run(
        [sys.executable, "-m", "lazy_tensor", "doctor"],
        env={**os.environ, "LAZY_TENSOR_COMPILE": "off", "LAZY_TENSOR_CACHE_DIR": str(tmp_path)},
        capture_output=True,
        text=True,
        check=True,
    )
    lines = {line.split()[0]: line for line in answer.stdout.splitlines()}
    assert lines["compile"].endswith("off  (LAZY_TENSOR_COMPILE)")
    assert str(tmp_path) in lines["cache_dir"]
    assert lines["backend"].endswith("(default)") or "LAZY_TENSOR_BACKEND" in os.environ
