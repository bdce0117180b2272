"""Compiled artifacts that outlive the process: one file each, named by what it was compiled from.

In: keys and bytes. Out: the same bytes, or None for anything doubtful. Called by `kernels.compile`.
A file is `_MAGIC`, the SHA-256 of the rest, the rest. It is read as bytes and never unpickled.
"""

from __future__ import annotations

import hashlib
import os
import stat
import tempfile
import threading
import warnings
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

_MAGIC = b"LTKERN01"
_SUFFIX = ".ltk"
_HEADER_BYTES = len(_MAGIC) + hashlib.sha256().digest_size


def key_of(*parts: str) -> str:
    """The name under which what depends on exactly `parts` is kept."""
    return hashlib.sha256("\0".join(parts).encode()).hexdigest()


class Disk:
    """Artifacts under `directory`, the least recently used dropped beyond `max_bytes`.

    Any number of processes may share the directory. It is created for its owner alone; one that
    another user owns or may write to is not used, as a kernel is code. Whatever goes wrong costs
    one warning and the cache, never the program.
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
        reason = _unsafe(directory)
        if reason is not None:
            self._turn_off(reason)

    @property
    def is_off(self) -> bool:
        return self._off_reason is not None

    def get(self, key: str) -> bytes | None:
        """What was `put` under `key`; None if nothing was, or if the file is damaged."""
        path = self._path(key)
        try:
            if self.is_off or _unsafe(path) is not None:
                return None
            content = path.read_bytes()
            artifact = _checked(content)
            if artifact is not None:
                os.utime(path)
        except OSError:
            return None
        return artifact

    def put(self, key: str, artifact: bytes) -> None:
        """Keep `artifact`. Readers see all of it or nothing."""
        if self.is_off:
            return
        content = _MAGIC + hashlib.sha256(artifact).digest() + artifact
        path = self._path(key)
        try:
            path.parent.mkdir(mode=0o700, exist_ok=True)
            _write_whole(path, content)
            self._trim(len(content))
        except OSError as error:
            self._turn_off(f"writing to it failed: {error}")

    def folder_of(self, key: str) -> Path:
        """Where the file of `key` lies."""
        return self.directory / key[:2]

    def _path(self, key: str) -> Path:
        return self.folder_of(key) / (key + _SUFFIX)

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
            f"process: {reason}",
            stacklevel=3,
        )


def _unsafe(path: Path) -> str | None:
    """Why what lies at `path` must not be trusted; None if only this user can have written it."""
    status = path.stat()
    if status.st_uid != os.getuid():
        return f"{path} belongs to user {status.st_uid}, not to {os.getuid()}"
    if status.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
        return f"{path} can be written by other users; chmod go-w it"
    return None


def _checked(content: bytes) -> bytes | None:
    artifact = content[_HEADER_BYTES:]
    expected = _MAGIC + hashlib.sha256(artifact).digest()
    return artifact if content[:_HEADER_BYTES] == expected else None


def _write_whole(path: Path, content: bytes) -> None:
    descriptor, temporary = tempfile.mkstemp(dir=path.parent)
    try:
        with os.fdopen(descriptor, "wb") as file:
            file.write(content)
        os.replace(temporary, path)
    except OSError:
        os.unlink(temporary)
        raise


class Entry(NamedTuple):
    """An artifact on disk: when it was used last (seconds since 1970), and its size."""

    used_s: float
    n_bytes: int
    path: Path


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
