"""`python -m lazy_tensor doctor`."""

from __future__ import annotations

import os
import subprocess
import sys
from importlib.metadata import version
from types import SimpleNamespace

import pytest
import torch

import lazy_tensor
from lazy_tensor.cli import doctor
from lazy_tensor.cli.main import main
from lazy_tensor.dispatch import settings
from lazy_tensor.dispatch.options import NAMES
from lazy_tensor.kernels import available_backends
from lazy_tensor.kernels.extension import cpp


def test_doctor_shows_versions_backends_and_every_setting(capsys):
    assert main(["doctor"]) == 0
    shown = capsys.readouterr().out
    assert torch.__version__ in shown
    words = shown.split()
    assert set(NAMES) <= set(words)
    assert set(available_backends("cpu")) <= set(words)


def test_versions_are_shown(capsys):
    with pytest.raises(SystemExit, match="0"):
        main(["--version"])
    shown = capsys.readouterr().out
    assert shown == f"lazy_tensor {lazy_tensor.__version__}, torch {torch.__version__}\n"
    assert version("lazy-tensor") == lazy_tensor.__version__


def test_doctor_shows_options_and_nothing_else_as_settings():
    assert [name for name, _ in doctor.settings_in_force()] == list(NAMES)


def built_state(monkeypatch, *, built=None, on_disk=None, problem=None):
    disk = SimpleNamespace(directory="/kernels", get=lambda key: on_disk)
    monkeypatch.setattr(cpp.Source, "built", lambda self: built)
    monkeypatch.setattr(doctor, "compiler", lambda: SimpleNamespace(disk=disk))
    if problem:
        monkeypatch.setattr(cpp, "_compiler", lambda: (_ for _ in ()).throw(RuntimeError(problem)))
    return dict(doctor.parts_in_cpp())["recorder"]


def test_doctor_says_whether_the_recorder_is_built_and_what_to_do(monkeypatch):
    monkeypatch.setattr(settings, "records_in_python", lambda: False)
    assert built_state(monkeypatch, built=b"it") == "built, with the package"
    assert built_state(monkeypatch, on_disk=b"it") == "built, in /kernels"
    told = built_state(monkeypatch)
    assert "not built" in told
    assert "cache warm" in told or 'compile="off"' in told
    told = built_state(monkeypatch, problem="there is no C++ compiler")
    assert told.startswith("not built: there is no C++ compiler")
    assert "go through Python" in told
    monkeypatch.setattr(settings, "records_in_python", lambda: True)
    assert built_state(monkeypatch).startswith("off, as LAZY_TENSOR_HITS=python says")


def test_doctor_says_that_headers_are_missing(monkeypatch, tmp_path):
    monkeypatch.setattr(cpp, "_compiler", lambda: "g++")
    monkeypatch.setattr("sysconfig.get_paths", lambda: {"include": str(tmp_path)})
    assert "install Python's headers" in cpp.HITS.problem()


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
