"""Loads a C++ file of this package: from disk, or compiled at first use, which takes seconds.

In: a source file and a function that uses the compiled library. Out: a call of that function; or
`status` says why there is no library. The program goes on without it meanwhile. The library is kept
on disk as kernels are, also if the program ends first. `program` and `dispatch.run.hits` have one
`Extension` each.
"""

from __future__ import annotations

import shutil
import subprocess
import sys
import threading
from collections.abc import Callable, Sequence
from pathlib import Path

from lazy_tensor.kernels.disk import Disk
from lazy_tensor.kernels.extension.build_apart import compiled
from lazy_tensor.kernels.extension.cpp import Source

BEHIND = 10
"""Niceness of a compiler that runs beside a program that doesn't wait for it.

A step on all cores waits for the slowest of them. A program on two cores, beside two busy
processes, does 0.4 to 0.5 of its steps if their niceness is 3, 0.85 if it is 10, and 0.95 if it is
19. But 19 leaves the compiler a hundredth of a core."""


class Extension:
    """A `Source`, and the library that it is compiled to.

    `use(library)` is called once, with the bytes of the library, in the thread that has obtained
    them. If the extension `waits`, `start_if_compiled` calls it instead, when that suits the
    program. `status` is "not asked for", "compiling", "compiled", "in use", or a sentence that says
    why there is no library.
    """

    def __init__(
        self, source: Source, use: Callable[[bytes], None], *, waits: bool = False
    ) -> None:
        self.status = "not asked for"
        self.source = source
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
        """Whether the library is there, and waits for `start_if_compiled`."""
        return self._waiting is not None

    def ask(self, disk: Disk | None, *, may_compile: bool, wait: bool) -> None:
        """Load it if it was compiled before, with the package or by a program; if it wasn't and
        `may_compile`, compile it: in a thread, or at once if `wait`.

        Only the first call looks whether it was compiled before, and only the first one that
        `may_compile` compiles. A later one with `wait` waits for a thread that compiles.
        """
        if not (self.is_asked_for or self._disk_was_asked):
            self._disk_was_asked = True
            with self._lock:
                library = self._compiled_before(disk)
                if library is not None:
                    self._have(library)
        if not may_compile or (self.is_asked_for and not (wait and self.status == "compiling")):
            return
        if wait:
            self._obtain(disk, is_waited_for=True)
        else:
            self.status = "compiling"
            name = f"lazy_tensor-{self.source.path.stem}"
            threading.Thread(target=self._obtain, args=(disk,), daemon=True, name=name).start()

    def _compiled_before(self, disk: Disk | None) -> bytes | None:
        library = self.source.built()
        if library is None and disk is not None:
            library = disk.get(self.source.key())
        return library

    def start_if_compiled(self) -> None:
        """Use the library if it waits for that."""
        if self._waiting is None:
            return
        with self._lock:  # of two threads that come at once, one gets the library
            library, self._waiting = self._waiting, None
        if library is not None:
            self._use_if_it_loads(library)

    def _obtain(self, disk: Disk | None, *, is_waited_for: bool = False) -> None:
        # A second thread, which asks with `wait`, waits here and finds what the first one made.
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
        """The compiled library: from before, or compiled now by a command that `prefix` begins.

        Raises CompileError, or RuntimeError if there is no compiler.
        """
        library = self._compiled_before(disk)
        if library is not None:
            return library
        command, key = [*prefix, *self.source.command()], self.source.key()
        if disk is not None and not disk.is_off:
            _build_apart(disk, key, command)
            library = disk.get(key)
        # None if it couldn't be kept on disk, or not compiled. Then compile it here: for this
        # process alone, or for the compiler's message.
        return compiled(command) if library is None else library


def _build_apart(disk: Disk, key: str, command: Sequence[str]) -> None:
    """Have `build_apart` put the library on disk, in a process that may outlive this one; wait."""
    script = Path(__file__).with_name("build_apart.py")
    subprocess.run(
        [sys.executable, "-I", "-S", str(script), str(disk.directory), key, *command],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        check=False,
    )


def _behind() -> list[str]:
    """What begins a command that is to run with niceness `BEHIND`, as compile workers do."""
    nice = shutil.which("nice")
    return [nice, "-n", str(BEHIND)] if nice else []
