"""Compiled artifacts that outlive the process: one file each, named by what it was compiled from.

In: keys and bytes. Out: the same bytes, or None for anything doubtful. Called by `service.compile`.
A file is `_MAGIC`, the SHA-256 of the rest, and the rest: a line about the artifact, padded, and
the artifact. It is read as bytes and never unpickled.
"""

from __future__ import annotations

import hashlib
import os
import stat
import tempfile
import threading
import time
import warnings
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from itertools import chain
from pathlib import Path
from typing import NamedTuple

_MAGIC = b"LTKERN02"
_SUFFIX = ".ltk"
LOOKS_EVERY_S = 0.02
"""How often a process looks whether another one is done with what both want."""
_HEADER_BYTES = len(_MAGIC) + hashlib.sha256().digest_size
_ABOUT_BYTES = 120


def key_of(*parts: str) -> str:
    """The name under which what depends on exactly `parts` is kept."""
    return hashlib.sha256("\0".join(parts).encode()).hexdigest()


class Disk:
    """Artifacts under `directory`, the least recently used dropped beyond `max_bytes`.

    Any number of processes may share the directory. It is created for its owner alone. One that
    another user owns or may write to is not used, as a kernel is code; nor is one in which a folder
    or a file is another user's, or a link. Whatever goes wrong costs one warning and the cache,
    never the program.
    """

    def __init__(self, directory: Path, max_bytes: int = 2 << 30) -> None:
        self.directory = directory
        self.max_bytes = max_bytes
        self._lock = threading.Lock()
        self._off_reason: str | None = None
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
        """What was `put` under `key`; None if nothing was, or if the file is damaged."""
        path = self._path(key)
        try:
            if not (self._is_trusted(path.parent) and self._is_trusted(path)):
                return None
            artifact = _checked(_content(path))
            if artifact is not None:
                os.utime(path)
        except OSError:
            return None
        return artifact

    def put(self, key: str, artifact: bytes, about: str = "") -> None:
        """Keep `artifact`. Readers see all of it or nothing. `about` says for people what it is."""
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
        """A folder of this user alone for a compiler's own files; None where there can't be one.

        Compilers make what is in it for their group too, so only owners are looked at there.
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
        """Whether only this user can have written what lies at `path`; if not, turn off."""
        if self.is_off:
            return False
        reason = _unsafe(path, may_be_a_link)
        if reason is not None:
            self._turn_off(reason)
        return reason is None

    @contextmanager
    def alone_with(
        self, keys: Iterable[str], gives_up: Callable[[], bool] = lambda: False
    ) -> Iterator[None]:
        """Wait until no other process or thread is in here with one of these keys, or `gives_up()`.

        So of several that want the same artifact, as the ranks of a program do, one makes it.
        """
        with ExitStack() as held:
            # in the same order everywhere: no two wait for each other
            for folder in sorted({self._folder_of(key) for key in keys}):
                held.enter_context(_locked(folder, gives_up))
            yield

    def _folder_of(self, key: str) -> Path:
        return self.directory / key[:2]

    def _path(self, key: str) -> Path:
        return self._folder_of(key) / (key + _SUFFIX)

    def _trim(self, added_bytes: int) -> None:
        """Drop old files if the directory has outgrown its bound.

        Its size is read once and then counted; other processes' files are seen at the next reading.
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
    """Why what lies at `path` must not be trusted; None if only this user can have written it."""
    foreign = _foreign(path)
    if foreign is not None:
        return foreign
    if path.is_symlink():
        if not may_be_a_link:
            return f"{path} is a link; delete it"
        path = path.resolve(strict=True)
    return _foreign(path) or _writable(path.stat(), path)


def _foreign(path: Path) -> str | None:
    """Whose the file, folder or link at `path` is, if it isn't this user's."""
    owner = path.lstat().st_uid
    if owner == os.getuid():
        return None
    return f"{path} belongs to user {owner}, not to {os.getuid()}; delete it if you can"


def _foreign_below(folder: Path) -> Iterator[str]:
    """What is another user's, of a folder and all in it; what goes meanwhile is left out."""
    found = (
        os.path.join(place, name) for place, *names in os.walk(folder) for name in chain(*names)
    )
    for path in chain([folder], map(Path, found)):
        with suppress(FileNotFoundError):
            reason = _foreign(path)
            if reason is not None:
                yield reason


def _writable(status: os.stat_result, path: Path) -> str | None:
    if status.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
        return f"{path} can be written by other users; chmod go-w it"
    return None


def _content(path: Path) -> bytes:
    """What a file of this user's holds; OSError for anything else.

    The file that was opened is looked at, as another may have taken the place of the one that was
    looked at by name; a pipe must not be waited for.
    """
    descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)
    with os.fdopen(descriptor, "rb") as file:
        status = os.fstat(descriptor)
        if not stat.S_ISREG(status.st_mode) or status.st_uid != os.getuid():
            raise OSError(f"{path} isn't a file of this user's")
        return file.read()


def _checked(content: bytes) -> bytes | None:
    rest = content[_HEADER_BYTES:]
    expected = _MAGIC + hashlib.sha256(rest).digest()
    return rest[_ABOUT_BYTES:] if content[:_HEADER_BYTES] == expected else None


def _write_whole(path: Path, content: bytes) -> None:
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
    descriptor = None
    try:
        # no locks on this system, or in this file system, or a folder that isn't ours
        with suppress(ImportError, OSError):
            import fcntl

            folder.mkdir(mode=0o700, exist_ok=True)
            descriptor = os.open(folder, os.O_RDONLY | os.O_NOFOLLOW | os.O_DIRECTORY)
            while not gives_up():
                with suppress(BlockingIOError):
                    fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
                    break
                time.sleep(LOOKS_EVERY_S)
        yield
    finally:
        if descriptor is not None:
            with suppress(OSError):
                fcntl.flock(descriptor, fcntl.LOCK_UN)  # forked children have it open too
            os.close(descriptor)


class Entry(NamedTuple):
    """An artifact on disk: when it was used last (seconds since 1970), and its size."""

    used_s: float
    n_bytes: int
    path: Path

    @property
    def about(self) -> str:
        """What it is, as whoever `put` it there said."""
        with suppress(OSError), self.path.open("rb") as file:
            said = file.read(_HEADER_BYTES + _ABOUT_BYTES)[_HEADER_BYTES:]
            return said.rstrip(b"\0").decode(errors="replace")
        return ""


def entries(directory: Path) -> Iterator[Entry]:
    """The artifacts in a directory, those that other processes drop meanwhile left out."""
    return (entry for entry in _files(directory) if entry.path.suffix == _SUFFIX)


def _files(directory: Path) -> Iterator[Entry]:
    for path in directory.glob("*/*"):
        with suppress(FileNotFoundError):
            status = path.stat()
            if stat.S_ISREG(status.st_mode):
                yield Entry(status.st_mtime, status.st_size, path)


def _drop_oldest(directory: Path, max_bytes: int) -> int:
    """Delete files, oldest use first, down to 9/10 of `max_bytes`; the bytes that remain.

    Scripts that show a disagreement count, and what a writer left that was killed.
    """
    found = sorted(_files(directory))
    size_bytes = sum(entry.n_bytes for entry in found)
    if size_bytes <= max_bytes:
        return size_bytes
    for entry in found:
        if size_bytes <= max_bytes * 9 // 10:
            break
        entry.path.unlink(missing_ok=True)
        size_bytes -= entry.n_bytes
    return size_bytes
