"""A cache folder that others may have written: nothing from it is loaded, and the program goes on.

A kernel is code: whoever writes to the folder would run theirs in this process.
"""

from __future__ import annotations

import os
import warnings

import pytest
import torch

from lazy_tensor.kernels import Ref, TensorSpec
from lazy_tensor.kernels.disk import Disk
from lazy_tensor.kernels.segment import Call, Segment

aten = torch.ops.aten
SPEC = TensorSpec((4,), (1,), torch.float32, torch.device("cpu"))
SEGMENT = Segment((SPEC,), (), (Call(aten.mul.Tensor, (Ref(0), 3.0), (), (SPEC,)),), (1,))
as_root = pytest.mark.skipif(os.getuid() != 0, reason="root alone can give files away")


def files(folder):
    return sorted(folder.rglob("*.ltk"))


def given_away(folder):
    os.chown(folder, 12345, 12345)


def group_writable(folder):
    folder.chmod(0o770)


def world_writable(folder):
    folder.chmod(0o707)


def with_a_file_of_another_user(folder):
    os.chown(files(folder)[0], 12345, 12345)


def with_a_file_that_others_write(folder):
    files(folder)[0].chmod(0o666)


def with_a_folder_of_another_user(folder):
    os.chown(files(folder)[0].parent, 12345, 12345)


def with_a_folder_that_others_write(folder):
    files(folder)[0].parent.chmod(0o777)


def with_a_link_for_a_folder(folder):
    inner = files(folder)[0].parent
    inner.rename(folder.with_name("elsewhere"))
    inner.symlink_to(folder.with_name("elsewhere"))


def with_a_link_for_a_file(folder):
    path = files(folder)[0]
    path.rename(folder.with_name("elsewhere"))
    path.symlink_to(folder.with_name("elsewhere"))


def a_link_to_a_folder_that_others_write(folder):
    elsewhere = folder.with_name("elsewhere")
    folder.rename(elsewhere)
    elsewhere.chmod(0o777)
    folder.symlink_to(elsewhere)


def a_link_of_another_user(folder):
    folder.rename(folder.with_name("elsewhere"))
    folder.symlink_to(folder.with_name("elsewhere"))
    os.lchown(folder, 12345, 12345)


def a_link_to_nowhere(folder):
    folder.rename(folder.with_name("elsewhere"))
    folder.symlink_to(folder.with_name("nowhere"))


def a_file(folder):
    folder.rename(folder.with_name("elsewhere"))
    folder.write_text("")


def with_a_folder_for_a_file(folder):
    path = files(folder)[0]
    path.unlink()
    path.mkdir()
    (path / "inside").write_text("")


def with_a_file_for_a_folder(folder):
    inner = files(folder)[0].parent
    inner.rename(folder.with_name("elsewhere"))
    inner.write_text("")


HOSTILE = [
    pytest.param(given_away, marks=as_root), group_writable, world_writable,
    pytest.param(with_a_file_of_another_user, marks=as_root), with_a_file_that_others_write,
    pytest.param(with_a_folder_of_another_user, marks=as_root), with_a_folder_that_others_write,
    with_a_link_for_a_folder, with_a_link_for_a_file, a_link_to_a_folder_that_others_write,
    pytest.param(a_link_of_another_user, marks=as_root), a_link_to_nowhere, a_file,
    with_a_folder_for_a_file, with_a_file_for_a_folder,
]  # fmt: skip


def truncated(path):
    path.write_bytes(path.read_bytes()[:-1])


def of_another_program(path):
    path.write_bytes(b"\x7fELF" + b"\0" * 100)


def empty(path):
    path.write_bytes(b"")


def a_pipe(path):
    path.unlink()
    os.mkfifo(path)


@pytest.fixture
def folder(tmp_path, new_compiler, portable_toy):
    """A cache folder with a kernel in it."""
    found = tmp_path / "cache"
    new_compiler(cache_dir=found).fusion_of(SEGMENT, portable_toy, mode="blocking")
    assert len(files(found)) == 1
    return found


@pytest.fixture
def warned():
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        yield caught


def result_with(folder, new_compiler, backend):
    compiler = new_compiler(cache_dir=folder)
    fusion = compiler.fusion_of(SEGMENT, backend, mode="blocking")
    (result,) = fusion.run([torch.arange(4.0)], [])
    assert torch.equal(result, torch.arange(4.0) * 3)
    assert fusion.status == "ready"
    return compiler.counters


def test_the_kernel_is_loaded_where_nothing_is_wrong(folder, new_compiler, portable_toy, warned):
    assert result_with(folder, new_compiler, portable_toy).loaded == 1
    assert not warned


def test_a_link_of_ones_own_to_a_folder_of_ones_own_is_used(folder, new_compiler, portable_toy):
    elsewhere = folder.with_name("elsewhere")
    folder.rename(elsewhere)
    folder.symlink_to(elsewhere)
    assert result_with(folder, new_compiler, portable_toy).loaded == 1


@pytest.mark.parametrize("hostile", HOSTILE)
def test_nothing_of_a_hostile_folder_is_loaded_and_one_warning_says_so(
    hostile, folder, new_compiler, portable_toy, warned
):
    hostile(folder)
    for _ in range(2):  # the second may not load what the first wrote
        warned.clear()
        counters = result_with(folder, new_compiler, portable_toy)
        assert (counters.compiled, counters.loaded) == (1, 0)
        (warning,) = warned
        told = str(warning.message)
        assert told.startswith(f"cache_dir={str(folder)!r} is not used")
        assert "set cache_dir (LAZY_TENSOR_CACHE_DIR) to another folder" in told


@pytest.mark.parametrize("damaged", [truncated, of_another_program, empty, a_pipe])
def test_a_file_that_holds_no_kernel_is_replaced_without_a_word(
    damaged, folder, new_compiler, portable_toy, warned
):
    damaged(files(folder)[0])
    assert result_with(folder, new_compiler, portable_toy).compiled == 1
    assert result_with(folder, new_compiler, portable_toy).loaded == 1
    assert not warned


def test_a_file_that_can_not_be_read_is_replaced(folder, new_compiler, portable_toy, monkeypatch):
    real = os.open

    def refuse(path, *args, **kwargs):
        if str(path).endswith(".ltk"):
            raise PermissionError(13, "Permission denied")
        return real(path, *args, **kwargs)

    with monkeypatch.context() as patch:
        patch.setattr(os, "open", refuse)
        assert result_with(folder, new_compiler, portable_toy).compiled == 1
    assert result_with(folder, new_compiler, portable_toy).loaded == 1


@pytest.mark.parametrize("hostile", [group_writable, a_link_to_a_folder_that_others_write])
def test_compilers_work_elsewhere_than_in_a_hostile_folder(hostile, folder, new_compiler, warned):
    hostile(folder)
    found = new_compiler(cache_dir=folder)._build_dir()
    assert found is not None
    assert str(folder.parent) not in found
    assert os.stat(found).st_mode & 0o777 == 0o700
    assert len(warned) == 1


def a_link(build):
    build.rename(build.with_name("other"))
    build.symlink_to(build.with_name("other"))


def a_library_of_another_user(build):
    (build / "ab").mkdir()
    (build / "ab" / "kernel.so").write_bytes(b"")
    os.chown(build / "ab" / "kernel.so", 12345, 12345)


@pytest.mark.parametrize(
    "hostile", [a_link, pytest.param(a_library_of_another_user, marks=as_root)]
)
def test_compilers_load_nothing_that_others_left_where_they_work(hostile, tmp_path, warned):
    disk = Disk(tmp_path / "cache")
    build = disk.work_folder("build")
    assert build is not None
    hostile(build)
    assert disk.work_folder("build") is None
    assert len(warned) == 1


def test_where_compilers_work_is_closed_to_the_group(tmp_path):
    disk = Disk(tmp_path / "cache")
    (tmp_path / "cache" / "build").mkdir(mode=0o775)
    build = disk.work_folder("build")
    assert build is not None
    assert build.stat().st_mode & 0o777 == 0o700
