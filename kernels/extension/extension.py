"""C++ of this package, compiled at first use in seconds and kept on disk as kernels are.

In: a source file. Out: the compiled file goes to who wants it, or `status` says why there is none.
Whoever asks goes on without; a process that ends before leaves the file to the next.
"""

from __future__ import annotations

import importlib.util
import shutil
import subprocess
import sys
import threading
from collections.abc import Callable, Sequence
from importlib.machinery import ExtensionFileLoader
from pathlib import Path
from typing import Any

from lazy_tensor.kernels.disk import Disk
from lazy_tensor.kernels.extension.build_apart import compiled
from lazy_tensor.kernels.extension.cpp import Source

BEHIND = 10
"""Niceness of what compiles beside a program that doesn't wait for it. A step on all cores waits
for the slowest of them: beside two busy processes a program on two cores does 0.4 to 0.5 of its
steps where they have 3, 0.85 where they have 10, and 0.95 where they have 19, which leaves them a
hundredth of a core."""


class Extension:
    """A source file, the headers that lie beside it, and what they are compiled to.

    `use(library)` is called once, with the bytes of a shared library: in whatever thread has them,
    or by `start_if_compiled` if it `waits` for that. `status` is "not asked for", "compiling",
    "compiled", "in use", or why there is none.
    """

    def __init__(
        self,
        source: Path,
        libraries: Sequence[str],
        use: Callable[[bytes], None],
        *,
        waits: bool = False,
    ) -> None:
        self.status = "not asked for"
        self.source = Source(source, libraries)
        self._use = use
        self._waits = waits
        self._waiting: bytes | None = None
        self._disk_was_asked = False
        self._lock = threading.Lock()

    @property
    def is_asked_for(self) -> bool:
        return self.status != "not asked for"

    @property
    def is_waiting(self) -> bool:
        """Whether it is there, to be used by `start_if_compiled`."""
        return self._waiting is not None

    def ask_for(self, disk: Disk | None, *, wait: bool) -> None:
        """Load or compile it: in a thread, or at once if `wait`. The first call counts."""
        if self.is_asked_for and not (wait and self.status == "compiling"):
            return
        if wait:
            self._obtain(disk, is_waited_for=True)
        else:
            self.status = "compiling"
            name = f"lazy_tensor-{self.source.path.stem}"
            threading.Thread(target=self._obtain, args=(disk,), daemon=True, name=name).start()

    def ask_disk(self, disk: Disk | None) -> None:
        """Take it from disk if it was compiled before, with the package or by a program; the first
        call counts."""
        if self.is_asked_for or self._disk_was_asked:
            return
        self._disk_was_asked = True
        with self._lock:
            library = self.source.built()
            if library is None and disk is not None:
                library = disk.get(self.source.key())
            if library is not None:
                self._have(library)

    def ask(self, disk: Disk | None, *, may_compile: bool, wait: bool) -> None:
        """Take it from disk or, if that `may_compile`, compile it: in a thread, or at once if
        `wait`."""
        self.ask_disk(disk)
        if may_compile:
            self.ask_for(disk, wait=wait)

    def start_if_compiled(self) -> None:
        """Use what waits to be used."""
        if self._waiting is None:
            return
        with self._lock:  # another thread may come, too
            library, self._waiting = self._waiting, None
        if library is not None:
            self._use_if_it_loads(library)

    def _obtain(self, disk: Disk | None, *, is_waited_for: bool = False) -> None:
        with self._lock:
            if self.status in ("compiled", "in use"):
                return
            try:
                library = self._binary(disk, [] if is_waited_for else _behind())
            except Exception as error:
                self.status = f"it can't be compiled: {error}"
                return
            self._have(library)

    def _have(self, library: bytes) -> None:
        if self._waits:
            self._waiting, self.status = library, "compiled"
        else:
            self._use_if_it_loads(library)

    def _use_if_it_loads(self, library: bytes) -> None:
        try:
            self._use(library)
        except Exception as error:
            self.status = f"it can't be loaded: {error}"
        else:
            self.status = "in use"

    def _binary(self, disk: Disk | None, prefix: list[str]) -> bytes:
        """The source compiled: before, or now, by a command that begins with `prefix`."""
        built = self.source.built()
        if built is not None:
            return built
        command, key = [*prefix, *self.source.command()], self.source.key()
        if disk is None or disk.is_off:
            return compiled(command)
        library = disk.get(key)
        if library is None:
            _build_apart(disk, key, command)
            library = disk.get(key)
        # what can't be kept is compiled for this process alone; what can't be compiled says why
        return library if library is not None else compiled(command)


def _build_apart(disk: Disk, key: str, command: Sequence[str]) -> None:
    """Have a process that may outlive this one put the library on disk; wait for it."""
    script = Path(__file__).with_name("build_apart.py")
    subprocess.run(
        [sys.executable, "-I", "-S", str(script), str(disk.directory), key, *command],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        check=False,
    )


def _behind() -> list[str]:
    """Runs the command that follows behind the program, as compile workers do."""
    nice = shutil.which("nice")
    return [nice, "-n", str(BEHIND)] if nice else []


def module_at(name: str, path: str, _: str) -> Any:
    """The extension module of Python's that lies at a path."""
    spec = importlib.util.spec_from_loader(name, ExtensionFileLoader(name, path))
    assert spec is not None, "a loader was given"
    assert spec.loader is not None, "a loader was given"
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module
