"""A checkout and an installed package have the same modules, and neither has those of others."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
import tarfile

import pytest

from tests.newcomer import ROOT
from tests.processes import run_python

FOLDERS = ("dispatch", "kernels", "lazy_tensor", "sharding")


@pytest.fixture
def at_the_root(monkeypatch):
    """Where Python finds the folders of a checkout before all else."""
    monkeypatch.chdir(ROOT)


def tracked(*folders):
    """The files in these folders, from the root of a checkout."""
    listed = subprocess.run(
        ["git", "ls-files", *folders], cwd=ROOT, capture_output=True, text=True, check=True
    )
    return {name for name in listed.stdout.splitlines() if (ROOT / name).is_file()}


def sources():
    """The files of the package."""
    return tracked(*FOLDERS)


def test_what_is_installed_is_all_that_the_checkout_has(newcomer):
    places = {name if name.startswith("lazy_tensor/") else f"lazy_tensor/{name}": name
              for name in sources()}  # fmt: skip
    missing = {name for name in places if not (newcomer.packages / name).is_file()}
    assert not missing


def test_source_distribution_has_all_that_builds_and_tests_it(newcomer, tmp_path):
    code = f"from setuptools.build_meta import build_sdist; build_sdist({str(tmp_path)!r})"
    newcomer.run("python", "-c", code, folder=newcomer.checkout)
    (archive,) = tmp_path.iterdir()
    with tarfile.open(archive) as files:
        names = {name.partition("/")[2] for name in files.getnames()}
        files.extractall(tmp_path, filter="data")
    others = tracked("tests", "benches", "docs", "examples", ".ci", "Makefile")
    assert not {*sources(), *others, "setup.py", "pyproject.toml"} - names
    (unpacked,) = (one for one in tmp_path.iterdir() if one.is_dir())
    newcomer.run("python", "-m", "pytest", "-q", "tests/test_tiny.py", folder=unpacked)


def test_a_wheel_with_compiled_code_is_for_one_python(newcomer):
    (information,) = newcomer.packages.glob("lazy_tensor-*.dist-info")
    wheel = (information / "WHEEL").read_text()
    abi = f"cp{sys.version_info.major}{sys.version_info.minor}"
    assert f"Tag: {abi}-{abi}-linux_" in wheel
    assert "Root-Is-Purelib: false" in wheel


def test_what_is_installed_brings_its_compiled_recorder(newcomer):
    code = (
        "import torch, lazy_tensor\n"
        "from lazy_tensor.dispatch.run import hits\n"
        "for _ in range(3):\n"
        "    with lazy_tensor.lazy_mode(compile='off'):\n"
        "        torch.ones(3) + 1\n"
        "print(hits.native is not None)"
    )
    python = newcomer.environment / "bin" / "python"
    shown = newcomer.run(python, "-c", code, folder=newcomer.elsewhere, PATH=os.devnull)
    assert shown == "True\n"


def test_the_command_is_installed(newcomer):
    shown = newcomer.run("lazy-tensor", "--version", folder=newcomer.elsewhere)
    assert shown.startswith("lazy_tensor ")


def test_installed_packages_look_for_modules_in_themselves_alone(newcomer):
    """Beside them lie packages of others, which may be called `dispatch` or `kernels`."""
    code = (
        "import lazy_tensor.sharding\n"
        "for name in ('dispatch', 'kernels', 'sharding'):\n"
        "    print(*getattr(lazy_tensor, name).__path__)\n"
        "print(*lazy_tensor.__path__)\n"
    )
    package = newcomer.packages / "lazy_tensor"
    expected = [package / "dispatch", package / "kernels", package / "sharding", package]
    printed = newcomer.run("python", "-c", code, folder=newcomer.elsewhere)
    assert printed.splitlines() == [str(path) for path in expected]


def test_package_of_others_is_found_at_the_root_where_a_folder_has_its_name(at_the_root, tmp_path):
    (tmp_path / "kernels").mkdir()
    (tmp_path / "kernels" / "__init__.py").write_text("__version__ = '0.10'")
    code = "import kernels, lazy_tensor.kernels as ours; print(kernels.__version__, ours.__name__)"
    assert run_python("-c", code, PYTHONPATH=str(tmp_path)) == "0.10 lazy_tensor.kernels\n"


@pytest.mark.skipif(importlib.util.find_spec("kernels") is not None, reason="kernels is installed")
def test_transformers_does_not_take_a_folder_at_the_root_for_a_package(at_the_root):
    pytest.importorskip("transformers")
    code = (
        "from transformers.utils import import_utils\n"
        "print(import_utils._is_package_available('kernels', return_version=True)[0])"
    )
    assert run_python("-c", code) == "False\n"


@pytest.mark.parametrize("name", ["dispatch", "kernels", "sharding"])
def test_no_folder_at_the_root_is_a_package_of_its_own(name):
    assert not (ROOT / name / "__init__.py").exists()
    assert (ROOT / "lazy_tensor" / name / "__init__.py").exists()
