"""Artifacts on disk: whole or not at all, bounded, and only our own."""

import os
import subprocess
import sys
import warnings
from concurrent.futures import ThreadPoolExecutor

import pytest

from lazy_tensor.kernels.disk import Disk, entries, key_of

KEY = key_of("a segment", "a backend")


@pytest.fixture
def disk(tmp_path):
    return Disk(tmp_path / "cache")


def files(disk):
    return [path for path in disk.directory.rglob("*") if path.is_file()]


def test_what_was_put_comes_back_in_another_process(disk):
    disk.put(KEY, b"kernel")
    assert Disk(disk.directory).get(KEY) == b"kernel"


def test_what_an_artifact_is_can_be_read_without_it(disk):
    disk.put(KEY, b"kernel", "inductor: " + "mul 2×, " * 40)
    (entry,) = entries(disk.directory)
    assert entry.about.startswith("inductor: mul 2×, mul 2×")
    assert disk.get(KEY) == b"kernel"


def test_a_folder_that_is_read_only_serves_what_is_in_it(disk, monkeypatch):
    def refuse(*_, **__):
        raise OSError(30, "Read-only file system")

    disk.put(KEY, b"kernel")
    monkeypatch.setattr(os, "utime", refuse)
    assert disk.get(KEY) == b"kernel"


def test_what_was_not_put_is_none(disk):
    assert disk.get(KEY) is None


def test_keys_tell_parts_apart():
    assert key_of("ab", "c") != key_of("a", "bc")


@pytest.mark.parametrize("damage", [b"", b"LTKERN02", b"LTKERN02" + b"x" * 100, b"junk"])
def test_damaged_artifact_is_skipped_and_can_be_replaced(disk, damage):
    disk.put(KEY, b"kernel")
    files(disk)[0].write_bytes(damage)
    assert disk.get(KEY) is None
    disk.put(KEY, b"kernel")
    assert disk.get(KEY) == b"kernel"


def test_one_flipped_bit_is_noticed(disk):
    disk.put(KEY, b"kernel" * 100)
    path = files(disk)[0]
    content = bytearray(path.read_bytes())
    content[-3] ^= 1
    path.write_bytes(content)
    assert disk.get(KEY) is None


HOLDS = """
import sys, time
from pathlib import Path
from lazy_tensor.kernels.disk import Disk
with Disk(Path(sys.argv[1])).alone_with(sys.argv[2]):
    print("held", flush=True)
    time.sleep(100)
"""


def test_a_key_is_one_process_s_until_it_ends(disk):
    holder = subprocess.Popen(
        [sys.executable, "-c", HOLDS, disk.directory, KEY], stdout=subprocess.PIPE
    )
    with holder:
        assert holder.stdout is not None
        assert holder.stdout.readline() == b"held\n"
        looks = iter([False, False, True])
        with disk.alone_with(KEY, lambda: next(looks)):
            assert next(looks, None) is None  # it gave up after two looks
        with disk.alone_with(key_of("another")):
            pass
        holder.kill()
    with disk.alone_with(KEY):
        pass


def test_directory_is_for_its_owner_alone(disk):
    assert disk.directory.stat().st_mode & 0o777 == 0o700


@pytest.mark.parametrize("mode", [0o770, 0o707])
def test_directory_that_others_can_write_is_refused_with_one_warning(tmp_path, mode):
    tmp_path.chmod(mode)
    with pytest.warns(UserWarning, match="chmod go-w"):
        disk = Disk(tmp_path)
    disk.put(KEY, b"kernel")  # a second warning would be an error
    assert disk.get(KEY) is None


def test_directory_of_another_user_is_refused(tmp_path, monkeypatch):
    monkeypatch.setattr(os, "getuid", lambda: 12345)
    with pytest.warns(UserWarning, match="belongs to user"):
        assert Disk(tmp_path).is_off


def test_artifact_that_others_can_write_is_not_read(disk):
    disk.put(KEY, b"kernel")
    files(disk)[0].chmod(0o666)
    with pytest.warns(UserWarning, match="chmod go-w"):
        assert disk.get(KEY) is None


def test_full_disk_costs_one_warning_and_no_half_file(disk, monkeypatch):
    def full(descriptor, mode):
        os.close(descriptor)
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fdopen", full)
    with pytest.warns(UserWarning, match="No space left"):
        disk.put(KEY, b"kernel")
    disk.put(KEY, b"kernel")  # a second warning would be an error
    assert files(disk) == []


def test_directory_that_cannot_be_made_costs_one_warning(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.warns(UserWarning, match="can't be created"):
        assert Disk(tmp_path / "file" / "cache").is_off


def test_size_is_bounded_and_the_least_recently_used_goes_first(tmp_path):
    disk = Disk(tmp_path, max_bytes=4000)
    keys = [key_of(str(i)) for i in range(4)]
    for age, key in enumerate(keys[:3]):
        disk.put(key, b"x" * 1000)
        os.utime(disk._path(key), (age, age))
    assert disk.get(keys[0]) is not None  # now the most recently used
    disk.put(keys[3], b"x" * 1000)
    assert [disk.get(key) is not None for key in keys] == [True, False, True, True]


def test_many_writers_of_one_key_leave_one_whole_artifact(disk):
    with warnings.catch_warnings(), ThreadPoolExecutor(8) as pool:
        list(pool.map(lambda _: disk.put(KEY, b"kernel" * 10_000), range(50)))
    assert disk.get(KEY) == b"kernel" * 10_000
    assert len(files(disk)) == 1
