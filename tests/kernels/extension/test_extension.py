"""C++ of the package: compiled once, kept on disk, and done without where it can't be had."""

import ctypes
import os
import shutil
import subprocess
import sys

import pytest
import torch

from lazy_tensor.kernels.backends.inductor import InductorBackend, _fingerprint
from lazy_tensor.kernels.disk import Disk
from lazy_tensor.kernels.extension import cpp, extension
from lazy_tensor.kernels.extension.extension import Extension
from lazy_tensor.kernels.library import loaded

pytestmark = pytest.mark.skipif(shutil.which("g++") is None, reason="there is no C++ compiler")


@pytest.fixture
def source(tmp_path):
    path = tmp_path / "answer.cpp"
    path.write_text('extern "C" int answer() { return 42; }')
    return cpp.Source(path, ())


@pytest.fixture
def package(tmp_path, source, monkeypatch):
    """The package, with sources that compile quickly."""
    question = tmp_path / "question.cpp"
    question.write_text('extern "C" int question() { return 6 * 9; }')
    monkeypatch.setattr(cpp, "HITS", source)
    monkeypatch.setattr(cpp, "PROGRAM", cpp.Source(question, ()))


@pytest.fixture
def never_compiled(monkeypatch):
    monkeypatch.setattr(extension, "compiled", lambda *_: pytest.fail("compiled again"))
    monkeypatch.setattr(extension, "_build_apart", lambda *_: pytest.fail("compiled again"))


def answer_of(library):
    return loaded(library, ctypes.CDLL).answer()


def test_it_is_compiled_once_and_then_taken_from_disk(tmp_path, source, request):
    disk = Disk(tmp_path / "disk")
    found: list[bytes] = []
    Extension(source, found.append).ask(disk, may_compile=True, wait=True)
    request.getfixturevalue("never_compiled")
    second = Extension(source, found.append)
    second.ask(disk, may_compile=True, wait=True)
    assert [answer_of(library) for library in found] == [42, 42]
    assert second.status == "in use"


def test_the_compiler_runs_in_the_session_of_the_program_but_not_its_process_group(tmp_path):
    told = "import os, sys; open(sys.argv[-1], 'w').write(f'{os.getsid(0)} {os.getpgrp()}')"
    disk = Disk(tmp_path / "disk")
    extension._build_apart(disk, "key", [sys.executable, "-c", told])
    library = disk.get("key")
    assert library is not None
    session, group = map(int, library.split())
    assert session == os.getsid(0)  # sessions are scheduled as equals, nice or not
    assert group != os.getpgrp()


def test_disk_alone_is_asked_first(tmp_path, source, request):
    disk = Disk(tmp_path / "disk")
    found: list[bytes] = []
    unknown = Extension(source, found.append)
    unknown.ask(disk, may_compile=False, wait=False)
    assert not found
    assert not unknown.is_asked_for
    unknown.ask(disk, may_compile=True, wait=True)
    request.getfixturevalue("never_compiled")
    Extension(source, found.append).ask(disk, may_compile=False, wait=False)
    assert len(found) == 2


def test_the_disk_is_asked_once(tmp_path, source, monkeypatch):
    unknown = Extension(source, lambda library: None)
    for _ in range(2):
        unknown.ask(Disk(tmp_path / "disk"), may_compile=False, wait=False)
        monkeypatch.setattr(Disk, "get", lambda *_: pytest.fail("asked again"))


A_SHORT_PROGRAM = """
import sys
import time
from pathlib import Path
from lazy_tensor.kernels.disk import Disk
from lazy_tensor.kernels.extension.cpp import Source
from lazy_tensor.kernels.extension.extension import Extension

directory, source = map(Path, sys.argv[1:])
Extension(Source(source, ()), print).ask(Disk(directory), may_compile=True, wait=False)
while not list(directory.glob("*/")):
    time.sleep(0.01)
"""


@pytest.fixture
def environment(held_compiler):
    return {**os.environ, "CXX": str(held_compiler.path)}


def test_it_is_there_for_the_next_process_when_this_one_ended_before(
    tmp_path, source, environment, held_compiler
):
    command = [sys.executable, "-c", A_SHORT_PROGRAM, str(tmp_path / "disk"), str(source.path)]
    subprocess.run(command, env=environment, check=True)
    assert not list((tmp_path / "disk").glob("*/*.ltk"))
    held_compiler.go.touch()
    found: list[bytes] = []
    Extension(source, found.append).ask(Disk(tmp_path / "disk"), may_compile=True, wait=True)
    assert answer_of(found[0]) == 42
    assert held_compiler.log.read_text().split() == ["started"]


def test_of_several_processes_one_compiles_it(tmp_path, source, environment, held_compiler):
    program = A_SHORT_PROGRAM.replace("wait=False", "wait=True").replace("print", "lambda _: None")
    command = [sys.executable, "-c", program, str(tmp_path / "disk"), str(source.path)]
    children = [subprocess.Popen(command, env=environment) for _ in range(3)]
    held_compiler.go.touch()
    assert [child.wait() for child in children] == [0, 0, 0]
    assert held_compiler.log.read_text().split() == ["started"]


def test_what_can_not_be_kept_is_compiled_for_this_process(tmp_path, source, monkeypatch):
    monkeypatch.setattr(Disk, "get", lambda *_: None)
    found: list[bytes] = []
    Extension(source, found.append).ask(Disk(tmp_path / "disk"), may_compile=True, wait=True)
    assert answer_of(found[0]) == 42


def test_it_may_wait_until_it_is_started(source):
    found: list[bytes] = []
    waiting = Extension(source, found.append, waits=True)
    waiting.ask(None, may_compile=True, wait=True)
    assert not found
    assert waiting.status == "compiled"
    for _ in range(2):
        waiting.start_if_compiled()
    assert len(found) == 1
    assert waiting.status == "in use"


def test_another_source_is_compiled_anew(tmp_path, source):
    disk = Disk(tmp_path / "disk")
    found: list[bytes] = []
    Extension(source, found.append).ask(disk, may_compile=True, wait=True)
    source.path.write_text('extern "C" int answer() { return 43; }')
    Extension(source, found.append).ask(disk, may_compile=True, wait=True)
    assert [answer_of(library) for library in found] == [42, 43]


def test_another_header_counts_too(tmp_path, source):
    disk = Disk(tmp_path / "disk")
    found: list[bytes] = []
    source.path.write_text('#include "number.h"\nextern "C" int answer() { return NUMBER; }')
    for number in (1, 2):
        source.path.with_name("number.h").write_text(f"#define NUMBER {number}")
        Extension(source, found.append).ask(disk, may_compile=True, wait=True)
    assert [answer_of(library) for library in found] == [1, 2]


def test_what_does_not_compile_says_so(source):
    source.path.write_text("int answer( {")
    broken = Extension(source, lambda library: None)
    broken.ask(None, may_compile=True, wait=True)
    assert "it can't be compiled" in broken.status
    assert "answer.cpp:1" in broken.status


def test_what_does_not_load_says_so(source):
    def refuse(library):
        raise OSError("no room")

    for waits in (False, True):
        refused = Extension(source, refuse, waits=waits)
        refused.ask(None, may_compile=True, wait=True)
        refused.start_if_compiled()
        assert refused.status == "it can't be loaded: no room"


def test_what_was_compiled_with_the_package_is_used_by_all(
    tmp_path, source, package, monkeypatch, never_compiled
):
    monkeypatch.setattr(cpp, "BUILT", tmp_path / "built")
    cpp.build(cpp.BUILT)
    for disk in (None, Disk(tmp_path / "disk")):
        found: list[bytes] = []
        Extension(source, found.append).ask(disk, may_compile=False, wait=False)
        Extension(source, found.append).ask(disk, may_compile=True, wait=True)
        assert [answer_of(library) for library in found] == [42, 42]


@pytest.fixture
def own_compiler(tmp_path, monkeypatch):
    """A compiler of which the test alone has the file."""
    path = tmp_path / "own-g++"
    path.write_text('#!/bin/sh\nexec g++ "$@"\n')
    path.chmod(0o755)
    monkeypatch.setenv("CXX", str(path))
    return path


def another_torch(monkeypatch):
    monkeypatch.setattr(torch.version, "git_version", "0" * 40)


def another_python(monkeypatch):
    monkeypatch.setattr(cpp, "EXTENSION_SUFFIXES", [".cpython-399-x86_64-linux-gnu.so"])


def another_compiler(monkeypatch):
    with open(os.environ["CXX"], "a") as file:
        file.write("# of another version\n")


@pytest.mark.parametrize("another", [another_torch, another_python, another_compiler])
def test_another_torch_python_or_compiler_changes_the_keys(
    another, source, own_compiler, monkeypatch
):
    def keys():
        _fingerprint.cache_clear()
        return source.key(), InductorBackend().fingerprint()

    before = keys()
    assert keys() == before
    another(monkeypatch)
    after = keys()
    monkeypatch.undo()
    _fingerprint.cache_clear()
    assert after[0] != before[0]
    assert after[1] != before[1]


def test_what_another_compiler_made_is_not_used_but_where_there_is_none(
    tmp_path, package, own_compiler, monkeypatch
):
    monkeypatch.setattr(cpp, "BUILT", tmp_path / "built")
    cpp.build(cpp.BUILT)
    built = cpp.HITS.built()
    assert built is not None
    another_compiler(monkeypatch)
    assert cpp.HITS.built() is None
    monkeypatch.delenv("CXX")
    monkeypatch.setenv("PATH", "")
    assert cpp.HITS.built() == built


def test_of_another_source_nothing_is_left_where_the_package_is_compiled(tmp_path, source, package):
    cpp.build(tmp_path / "built")
    source.path.write_text('extern "C" int answer() { return 43; }')
    cpp.build(tmp_path / "built")
    assert len(list((tmp_path / "built").iterdir())) == 2
    assert cpp.HITS.built() is None  # that is where the package is, not here


def test_it_compiles_before_the_package_can_be_imported():
    """As pip has it: beside torch and the standard library nothing is there."""
    told = (
        "import sys; sys.modules['lazy_tensor'] = sys.modules['cachetools'] = None\n"
        f"import runpy; runpy.run_path({str(cpp.__file__)!r})"
    )
    subprocess.run([sys.executable, "-P", "-c", told], check=True)
