"""Compiled artifacts on disk (`cache_dir`): one file each, named by a hash of its inputs.

In: keys and bytes. Out: the same bytes, or None for a file that is missing, damaged or unsafe.
Called by `service.compile`, and by `extension` for the package's own C++.
A file holds `_MAGIC`, the SHA-256 of the rest, a description padded to `_ABOUT_BYTES`, and the
artifact. It is read as bytes and never unpickled.
"""

from __future__ import annotations

import hashlib
import os
import stat
import tempfile
import threading
import time
import warnings
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, suppress
from itertools import chain
from pathlib import Path
from typing import NamedTuple

_MAGIC = b"LTKERN02"
_SUFFIX = ".ltk"
LOOKS_EVERY_S = 0.02
"""Seconds between two attempts to take a lock that another process holds."""
_HEADER_BYTES = len(_MAGIC) + hashlib.sha256().digest_size
# a fixed size, so that `cache list` reads the description without the artifact
_ABOUT_BYTES = 120


def key_of(*parts: str) -> str:
    """The key of an artifact that depends on exactly `parts`."""
    # joined by a character that no part holds, so that ("ab", "c") and ("a", "bc") differ
    return hashlib.sha256("\0".join(parts).encode()).hexdigest()


class Disk:
    """Artifacts under `directory`; beyond `max_bytes` the least recently used are deleted.

    Any number of processes may share the directory. It is created for its owner alone. Kernels are
    code that will be run, so nothing is read that another user may have written. The cache is
    turned off at the first folder or file that another user owns or can write, or that is a link.
    Only the directory itself may be a link. A failed write turns the cache off too. Either costs
    one warning, and nothing is raised.
    """

    def __init__(self, directory: Path, max_bytes: int = 2 << 30) -> None:
        self.directory = directory
        self.max_bytes = max_bytes
        self._lock = threading.Lock()
        # why the cache is turned off, as the warning says it; None while it is in use
        self._off_reason: str | None = None
        # bytes of all files, as `_trim` counts them; None before the first count
        self._size_bytes: int | None = None
        try:
            directory.mkdir(mode=0o700, parents=True, exist_ok=True)
        except OSError as error:
            self._turn_off(f"it can't be created: {error}")
            return
        self._is_trusted(directory, may_be_a_link=True)

    @property
    def is_off(self) -> bool:
        return self._off_reason is not None

    def get(self, key: str) -> bytes | None:
        """The artifact under `key`; None if there is none, or if the file is damaged."""
        path = self._path(key)
        try:
            # the folder too: who can write it can replace the file between check and open
            if not (self._is_trusted(path.parent) and self._is_trusted(path)):
                return None
            artifact = _checked(_content(path))
            if artifact is not None:
                # `_drop_oldest` goes by this time: many systems don't note when a file is read, and
                # a folder that can't be written drops nothing
                with suppress(OSError):
                    os.utime(path)
        except OSError:
            return None
        return artifact

    def put(self, key: str, artifact: bytes, about: str = "") -> None:
        """Write `artifact` under `key`. Readers see all of it or nothing.

        `about` is a description for people, which `cache list` shows.
        """
        if self.is_off:
            return
        rest = about.encode()[:_ABOUT_BYTES].ljust(_ABOUT_BYTES, b"\0") + artifact
        content = _MAGIC + hashlib.sha256(rest).digest() + rest
        path = self._path(key)
        try:
            path.parent.mkdir(mode=0o700, exist_ok=True)
            if self._is_trusted(path.parent):
                _write_whole(path, content)
                self._trim(len(content))
        except OSError as error:
            self._turn_off(f"writing to it failed: {error}")

    def work_folder(self, name: str) -> Path | None:
        """A folder for a compiler's own files, closed to other users; None if there can't be one.

        Compilers may make files in it that the group can write. So the files' owners are checked,
        but not their permissions: the folder itself is closed to the group.
        """
        folder = self.directory / name
        if self.is_off:
            return None
        try:
            folder.mkdir(mode=0o700, exist_ok=True)
            reason = next(_foreign_below(folder), None)
            if folder.is_symlink():
                reason = f"{folder} is a link; delete it"
            if reason is None:
                folder.chmod(0o700)
        except OSError as error:
            reason = f"{folder} can't be used: {error}"
        if reason is not None:
            self._turn_off(reason)
        return None if self.is_off else folder

    def _is_trusted(self, path: Path, *, may_be_a_link: bool = False) -> bool:
        """Whether only this user can have written `path`; if not, turn the cache off."""
        if self.is_off:
            return False
        reason = _unsafe(path, may_be_a_link)
        if reason is not None:
            self._turn_off(reason)
        return reason is None

    def alone_with(
        self, key: str, gives_up: Callable[[], bool] = lambda: False
    ) -> AbstractContextManager[None]:
        """A context that holds the lock of this key, or goes on without it once `gives_up()`.

        Other processes and threads that want the key wait. So if several processes need the same
        artifact, as the ranks of a program do, one builds it and the others then load it. There is
        one lock for each folder, so unrelated keys may wait for each other too.
        """
        return _locked(self._folder_of(key), gives_up)

    def _folder_of(self, key: str) -> Path:
        # 256 folders, as the key is hexadecimal
        return self.directory / key[:2]

    def _path(self, key: str) -> Path:
        return self._folder_of(key) / (key + _SUFFIX)

    def _trim(self, added_bytes: int) -> None:
        """Delete old files if the directory has outgrown `max_bytes`.

        The files' sizes are read at the first call. After that this process adds up what it writes,
        and reads them again when its count reaches the bound. Only then does it see the files that
        other processes have written.
        """
        with self._lock:
            if self._size_bytes is not None and self._size_bytes + added_bytes <= self.max_bytes:
                self._size_bytes += added_bytes
                return
            self._size_bytes = _drop_oldest(self.directory, self.max_bytes)

    def _turn_off(self, reason: str) -> None:
        with self._lock:
            if self.is_off:
                return
            self._off_reason = reason
        warnings.warn(
            f"cache_dir={str(self.directory)!r} is not used, kernels are compiled anew in every "
            f"process: {reason}; or set cache_dir (LAZY_TENSOR_CACHE_DIR) to another folder, of "
            "your own",
            stacklevel=3,
        )


def _unsafe(path: Path, may_be_a_link: bool) -> str | None:
    """Why `path` must not be trusted; None if only this user can have written it."""
    # first the link itself: its owner decides where it leads
    foreign = _foreign(path)
    if foreign is not None:
        return foreign
    if path.is_symlink():
        if not may_be_a_link:
            return f"{path} is a link; delete it"
        path = path.resolve(strict=True)
    # then its target, or again `path` itself
    foreign = _foreign(path)
    if foreign is None and path.stat().st_mode & (stat.S_IWGRP | stat.S_IWOTH):
        return f"{path} can be written by other users; chmod go-w it"
    return foreign


def _foreign(path: Path) -> str | None:
    """A message if the file, folder or link at `path` belongs to another user; else None."""
    owner = path.lstat().st_uid
    if owner == os.getuid():
        return None
    return f"{path} belongs to user {owner}, not to {os.getuid()}; delete it if you can"


def _foreign_below(folder: Path) -> Iterator[str]:
    """A message for each file or folder of another user, of `folder` and all below it.

    Files that another process deletes meanwhile are skipped.
    """
    found = (
        os.path.join(place, name) for place, *names in os.walk(folder) for name in chain(*names)
    )
    for path in chain([folder], map(Path, found)):
        with suppress(FileNotFoundError):
            reason = _foreign(path)
            if reason is not None:
                yield reason


def _content(path: Path) -> bytes:
    """The content of a regular file that this user owns; OSError for anything else.

    The checks before were made by name, and the file may have been replaced since. So the owner of
    the opened file is checked again.
    """
    # a link raises, and a pipe opens at once instead of waiting for a writer
    descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)
    with os.fdopen(descriptor, "rb") as file:
        status = os.fstat(descriptor)
        if not stat.S_ISREG(status.st_mode) or status.st_uid != os.getuid():
            raise OSError(f"{path} isn't a file of this user's")
        return file.read()


def _checked(content: bytes) -> bytes | None:
    """The artifact in a file's content; None if its hash or its format is another."""
    rest = content[_HEADER_BYTES:]
    expected = _MAGIC + hashlib.sha256(rest).digest()
    return rest[_ABOUT_BYTES:] if content[:_HEADER_BYTES] == expected else None


def _write_whole(path: Path, content: bytes) -> None:
    """Write `path` so that no reader ever sees a part of `content`."""
    # in the same folder, as a rename is atomic only within one file system
    descriptor, temporary = tempfile.mkstemp(dir=path.parent)
    try:
        with os.fdopen(descriptor, "wb") as file:
            file.write(content)
        os.replace(temporary, path)
    except OSError:
        os.unlink(temporary)
        raise


@contextmanager
def _locked(folder: Path, gives_up: Callable[[], bool]) -> Iterator[None]:
    """Hold the lock of `folder`, or go on without it if `gives_up()` or there are no locks here.

    The system releases the lock of a process that ends, so a crash blocks nobody.
    """
    descriptor = None
    try:
        # An error means that this system or file system has no locks, or that the folder is not
        # ours. Then several processes may build the same artifact, which costs only time.
        with suppress(ImportError, OSError):
            import fcntl

            folder.mkdir(mode=0o700, exist_ok=True)
            descriptor = os.open(folder, os.O_RDONLY | os.O_NOFOLLOW | os.O_DIRECTORY)
            # polled, as a blocking `flock` could not look at `gives_up`
            while not gives_up():
                with suppress(BlockingIOError):
                    fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
                    break
                time.sleep(LOOKS_EVERY_S)
        yield
    finally:
        if descriptor is not None:
            # explicitly, since a forked child may hold a copy of the descriptor: closing ours alone
            # would leave the lock held
            with suppress(OSError):
                fcntl.flock(descriptor, fcntl.LOCK_UN)
            os.close(descriptor)


class Entry(NamedTuple):
    """A file on disk: when it was last used (seconds since 1970), and its size.

    Entries sort by `used_s`, its first field.
    """

    used_s: float
    n_bytes: int
    path: Path

    @property
    def about(self) -> str:
        """The description that was given to `put`; empty if the file can't be read."""
        with suppress(OSError), self.path.open("rb") as file:
            said = file.read(_HEADER_BYTES + _ABOUT_BYTES)[_HEADER_BYTES:]
            return said.rstrip(b"\0").decode(errors="replace")
        return ""


def entries(directory: Path) -> Iterator[Entry]:
    """The artifacts in a directory. Files that other processes delete meanwhile are skipped."""
    return (entry for entry in _files(directory) if entry.path.suffix == _SUFFIX)


def _files(directory: Path) -> Iterator[Entry]:
    for path in directory.glob("*/*"):
        with suppress(FileNotFoundError):
            status = path.stat()
            if stat.S_ISREG(status.st_mode):
                yield Entry(status.st_mtime, status.st_size, path)


def _drop_oldest(directory: Path, max_bytes: int) -> int:
    """Delete the least recently used files, down to 9/10 of `max_bytes`; return the bytes left.

    All files one folder down count, not only artifacts: also the scripts in `disagreements`, and
    temporary files of writers that were killed.
    """
    found = sorted(_files(directory))
    size_bytes = sum(entry.n_bytes for entry in found)
    if size_bytes <= max_bytes:
        return size_bytes
    for entry in found:
        # below the bound by a tenth, so that not every `put` from here on reads the directory
        if size_bytes <= max_bytes * 9 // 10:
            break
        entry.path.unlink(missing_ok=True)
        size_bytes -= entry.n_bytes
    return size_bytes
