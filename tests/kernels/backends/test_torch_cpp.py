"""Units of kernels, and the header that is compiled once for all of them."""

import ctypes
import subprocess

import pytest
from torch._inductor import codecache

from lazy_tensor.kernels.backends import torch_cpp
from lazy_tensor.kernels.backends.torch_cpp import PrecompiledHeader, Unit

TEXT = """#include <cstdint>
static int64_t number() {{ return {0}; }}
extern "C" void kernel(int64_t* out) {{ *out = number(); }}
// Python bindings to call kernel():
#include <no_such_header.h>
"""


@pytest.fixture(autouse=True)
def own_folder(tmp_path, monkeypatch):
    monkeypatch.setattr(torch_cpp, "_folder", lambda _: str(tmp_path))
    monkeypatch.setattr(codecache, "_get_cpp_prefix_header", lambda _: "cstdint")


@pytest.fixture
def commands(monkeypatch):
    """The shell commands that were run; they are waited for."""
    found: list[str] = []

    def run(command, **options):
        if command[0] != "sh":
            return subprocess_run(command, **options)
        found.append(command[-1])
        return subprocess_run([*command[:-1], f"{command[-1]} wait"], **options)

    subprocess_run = subprocess.run
    monkeypatch.setattr(subprocess, "run", run)
    return found


def test_kernels_of_one_unit_have_names_of_their_own(tmp_path, commands):
    unit = Unit()
    with unit:
        for n in (3, 5):
            codecache.CppPythonBindingsCodeCache.load_async(TEXT.format(n))
    path = tmp_path / "unit.so"
    path.write_bytes(unit.compile())
    library, out = ctypes.CDLL(str(path)), ctypes.c_int64()
    for name, n in ("kernel_0", 3), ("kernel_1", 5):
        getattr(library, name)(ctypes.byref(out))
        assert out.value == n


def test_the_header_is_compiled_once_behind_the_first_unit(commands):
    header = PrecompiledHeader()
    assert not header.is_there()
    header.make()
    assert header.is_there()
    header.make()
    assert len(commands) == 1
    header.path.parent.chmod(0o777)
    assert not header.is_there()


def test_a_header_that_another_process_makes_is_left_to_it(commands):
    header = PrecompiledHeader()
    header.path.parent.mkdir(mode=0o700)
    header.path.with_suffix(".making").touch()
    header.make()
    assert not commands
