"""The compile service: makes a fusion of each segment, and obtains its kernel, now or later.

In: segments, a backend, and the mode ("background", "blocking", "off"). Out: fusions, which can run
at once: op by op until their kernel is ready. `dispatch.run.plan_cache` and
`dispatch.plan.second_tier` call it. One `Compiler` has all state of one `cache_dir`.

A kernel comes from disk, or a backend builds it, in a worker process if it can. If a backend fails
or declines, the next one is tried. `Fusion` then decides whether the kernel is used.
"""

from __future__ import annotations

import os
import tempfile
import threading
from collections import Counter, deque
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext, suppress
from functools import partial
from pathlib import Path
from time import perf_counter
from typing import Literal, NamedTuple, TypeGuard, TypeVar, cast
from weakref import WeakSet

import torch

from lazy_tensor.kernels.backend import (
    Backend,
    BuildsSoon,
    Declined,
    GenericBackend,
    Kernel,
    PortableBackend,
    Prepared,
    Thrifty,
    after,
)
from lazy_tensor.kernels.backends.artifact import Steps
from lazy_tensor.kernels.backends.aten import AtenBackend
from lazy_tensor.kernels.cache import Cache
from lazy_tensor.kernels.counters import Counters
from lazy_tensor.kernels.disk import Disk, key_of
from lazy_tensor.kernels.extension.extension import BEHIND
from lazy_tensor.kernels.extension.pool import keep_freed_heap
from lazy_tensor.kernels.extension.program import touches_much
from lazy_tensor.kernels.library import own_folder
from lazy_tensor.kernels.logs import COMPILES
from lazy_tensor.kernels.segment import Segment, counted
from lazy_tensor.kernels.service.families import Families
from lazy_tensor.kernels.service.fusion import Fusion
from lazy_tensor.kernels.service.jobs import Jobs
from lazy_tensor.kernels.service.repro import write_script
from lazy_tensor.kernels.service.workers import (
    BUILD_LIMIT_S,
    BuildError,
    WorkerDied,
    Workers,
    is_known_to_workers,
)

Mode = Literal["background", "blocking", "off"]
T = TypeVar("T")
# segment, backend, `verify_every`, number of threads
_Key = tuple[Segment, Backend, int, int]

_aten = AtenBackend()

DROPPED = b"dropped: "
"""The first bytes of a file that replaces an artifact, so that no process builds the kernel again:
its results were wrong, or its build crashed a worker. The reason follows."""


class Build(NamedTuple):
    """One build for the report: when it began (`time.perf_counter`), its duration, and its name."""

    began_s: float
    seconds: float
    what: str


MAX_WAIT_AT_THE_END_S = 10.0
"""Seconds that the process waits at exit for each queue of jobs."""
SOON_AFTER_S = 0.03
"""Seconds that a segment must have run op by op before a kernel of `loops` is tried for it.

The build takes a few times as long, on another core. A loop of ten Runge-Kutta steps has its four
kernels after 0.9 s. With 0.1 s here, it is first compared with eager without them, and has them
after 4 s."""
MOST_BUILDS = 256
"""The most builds that are kept for the report, the latest ones."""


class Compiler:
    """Makes fusions of segments, at most `maxsize` of them, and obtains their kernels.

    Kernels are kept in `cache_dir`, or until the process ends if it is None. `n_workers` is the
    number of worker processes; the default leaves one core to the program. In "background" mode a
    kernel is built once its segment has run `threshold` times and `may_build()` returns true. That
    is so when the program has run for a while: a short program ends before a build would pay.
    """

    def __init__(
        self,
        *,
        maxsize: int = 1024,
        cache_dir: Path | None = None,
        n_workers: int | None = None,
        counters: Counters | None = None,
        may_build: Callable[[], bool] = lambda: True,
    ) -> None:
        self.counters = counters or Counters()
        # the last builds, read by `report`
        self.builds: deque[Build] = deque(maxlen=MOST_BUILDS)
        self.cache: Cache[_Key, Fusion] = Cache("kernel", maxsize, self._handle_eviction)
        self.disk = Disk(cache_dir or Path(tempfile.mkdtemp(dir=own_folder())))
        self._may_build = may_build
        # guards making a fusion, and the step from status "aten" to "queued"
        self._creating = threading.Lock()
        self._families = Families(maxsize)
        # all fusions that plans still use, also those evicted from `cache`
        self._fusions: WeakSet[Fusion] = WeakSet()
        self._workers = Workers(n_workers, self._build_dir)
        # only one, as each worker holds a context on the device, and its memory
        self._device_workers = Workers(1, self._build_dir)
        # Loading takes milliseconds and building seconds, so loads must not wait behind builds.
        # A build thread only waits for its worker, so there are as many threads as workers.
        self._to_load = Jobs(partial(self._take_kernel, builds=False), n_threads=1)
        # for the same reason, simple segments have a queue of their own
        self._to_build_soon = Jobs(self._obtain_if_simple, n_threads=1)
        self._to_build = Jobs(self._obtain_alone, self._workers.size)
        self._pools = self._workers, self._device_workers
        self._queues = self._to_load, self._to_build_soon, self._to_build
        self._parts: tuple[Jobs | Workers, ...] = *self._queues, *self._pools
        self._is_forked = False
        self._is_closed = False
        _all.add(self)
        keep_freed_heap()

    def fusion_of(
        self,
        segment: Segment,
        backend: Backend,
        *,
        mode: Mode,
        threshold: int = 2,
        verify_every: int = 0,
        measure: bool | None = None,
        waits: bool = True,
    ) -> Fusion:
        """The fusion of `segment` under `backend`; equal segments share it while it is cached.

        - "off": the fusion runs op by op.
        - "blocking": returns when the kernel is ready or has failed. Without `waits` it only
          queues the build, and `finish` waits for several, which are built side by side.
        - "background": returns at once. The fusion runs op by op until its kernel is ready. A
          kernel on disk is loaded at once; otherwise one is built after `threshold` runs.

        With `measure` a kernel is used only if it measures faster than op-by-op replay. By default
        that is so on the CPU in "background" mode.
        """
        if mode == "off" or self._is_forked or backend.name == "aten":
            return self._find(segment, _aten, 0)[0]
        for workers in self._pools:
            workers.niceness = 0 if mode == "blocking" else BEHIND
        fusion, is_new = self._find(segment, backend, verify_every)
        if is_new:
            is_timed = mode == "background" and segment.device.type == "cpu"
            fusion.measure = is_timed if measure is None else measure
            fusion.threshold = threshold
            self._join_family(fusion)
        # From here on the status decides. It is "aten" if nothing was asked for yet. The fusion may
        # also be known from another mode, or have its family's kernel already.
        if mode == "blocking" and fusion.status in ("aten", "queued", "compiling"):
            # a build looks on disk first, so no load beside it is needed
            self._to_load.take_back(fusion)
            if fusion.status == "aten":
                fusion.status = "queued"
                self._to_build.add(fusion)
            if waits:
                self.finish([fusion])
        elif fusion.status != "aten":
            pass  # its kernel is being made, or its status is final
        elif is_new and self._artifact_key(fusion) is not None:
            # Runs are only counted while the disk is looked at. If nothing is there, `_take_kernel`
            # calls `count_runs` again, with `_request`.
            fusion.count_runs()
            self._to_load.add(fusion)
        elif is_new:
            fusion.count_runs(self._request)
        return fusion

    def finish(self, fusions: Sequence[Fusion]) -> None:
        """Wait until the kernels of these fusions are ready or have failed."""
        for fusion in fusions:
            self._to_build_soon.finish(fusion)
            self._to_build.finish(fusion)

    def statuses(self) -> Counter[str]:
        """The number of fusions in each status, without those for which no kernel was asked."""
        statuses: Counter[str] = Counter(fusion.status for fusion in list(self._fusions))
        del statuses["aten"]
        return statuses

    def wait(self, timeout_s: float | None = None) -> bool:
        """Wait until nothing is left to load or build; False if either takes over `timeout_s`."""
        return all(jobs.wait(timeout_s) for jobs in self._queues)

    def close(self) -> None:
        """Drop all queued work and end the workers. Fusions keep running what they run now."""
        self._is_closed = True
        for part in self._parts:
            part.close()

    def end(self) -> None:
        """Close at the end of the process, and wait for the job threads."""
        self.close()
        for jobs in self._queues:
            jobs.join(MAX_WAIT_AT_THE_END_S)

    def after_fork_in_child(self) -> None:
        """Run everything op by op in a forked child.

        The child has no threads of OpenMP, in which kernels run, and the workers belong to its
        parent.
        """
        self._is_forked = True
        # another thread of the parent may have held the lock at the fork
        self._creating = threading.Lock()
        for part in self._parts:
            part.forget()
        for fusion in list(self._fusions):
            fusion.run_op_by_op("this is a forked child process")

    def _find(self, segment: Segment, backend: Backend, verify_every: int) -> tuple[Fusion, bool]:
        """The fusion in the cache, or a new one; and whether it is new."""
        # with the number of threads, which Inductor compiles into a kernel
        key = (segment, backend, verify_every, torch.get_num_threads())
        with self._creating:
            fusion = self.cache.get(key)
            if fusion is not None:
                self.counters.add("reused")
                return fusion, False
            fusion = Fusion(segment, backend, self.counters, verify_every, self._drop)
            self._fusions.add(fusion)
            self.cache.put(key, fusion)
            return fusion, True

    def _drop(
        self, fusion: Fusion, reason: str, inputs: tuple[Sequence[torch.Tensor], Sequence[float]]
    ) -> str:
        """Keep all processes from using the fusion's kernel again, and write a script to show why.

        Called when a kernel's results were wrong on `inputs`. Returns text for the warning, which
        names the script.
        """
        if self.disk.is_off:
            return ""
        # in place of the artifact, so that no process loads or builds it again
        key = self._artifact_key(fusion, number=0)
        if key is not None:
            self.disk.put(key, DROPPED + reason.encode(), _description(fusion))
        if fusion.member is not None:
            # other sizes must not use the generic kernel either: each gets a kernel of its own
            fusion.member.family.is_apart = True
            fusion.member.kernels.clear()
        folder, backend = self.disk.directory / "disagreements", fusion.backend.name
        path = write_script(folder, backend, fusion.segment, fusion.source, inputs, reason)
        return "" if path is None else f"; run {path} to see it"

    def _handle_eviction(self, key: _Key, fusion: Fusion) -> None:
        if any(jobs.take_back(fusion) for jobs in self._queues):
            fusion.run_op_by_op("evicted from the kernel cache before it was compiled")

    def _request(self, fusion: Fusion) -> None:
        """Queue the fusion's build; called at each run once it has run `threshold` times."""
        spent_s = fusion.spent_s if fusion.member is None else fusion.member.family.spent_s
        is_soon = fusion.may_be_simple and spent_s >= SOON_AFTER_S
        if not (is_soon or self._may_ask_workers(fusion)):
            return  # the next run asks again
        with self._creating:
            if fusion.status != "aten":
                return  # another thread has queued it in the meantime
            fusion.status = "queued"
        self._to_build_soon.add(fusion)

    def _may_ask_workers(self, fusion: Fusion) -> bool:
        # A threshold of 1 or less asks for a build at once, whatever the program's age.
        return fusion.threshold <= 1 or self._may_build()

    def _join_family(self, fusion: Fusion) -> None:
        """Add a new fusion to the family of its structure, and adopt the family's kernel if built.

        Called in the thread that flushes, so it does nothing slow.
        """
        backend, segment = fusion.backend, fusion.segment
        reason = backend.declines(segment) if isinstance(backend, Thrifty) else None
        if reason is not None:
            fusion.give_up(reason)
            return
        try:
            fusion.member = self._families.member(fusion.segment, fusion.backend)
            if fusion.member is None:
                return
            family = fusion.member.family
            # Runs are counted for the structure, whose other members have run already. A program
            # whose sizes change at each step would otherwise never reach the threshold.
            fusion.n_runs = family.n_members - 1
            kernel = self._kernel_of_family(fusion)
            # a Prepared kernel must first compile for these sizes, in the background
            if kernel is not None and not isinstance(kernel, Prepared):
                fusion.adopt(kernel, "of other sizes")
        except Declined as reason:
            fusion.give_up(str(reason))

    def _obtain_if_simple(self, fusion: Fusion) -> None:
        """Build the kernel if the segment is simple; else queue it for a worker."""
        if self._has_kernel(fusion) or self._build_soon(fusion):
            self._obtain(fusion)
        elif self._may_ask_workers(fusion):
            self._to_build.add(fusion)
        else:
            fusion.status = "aten"  # it is asked for again

    def _build_soon(self, fusion: Fusion) -> bool:
        """Build the artifact if the segment is simple, into `fusion.ahead`; false if it isn't."""
        backend, source = fusion.backend, fusion.source
        artifact, start = None, perf_counter()
        if (
            fusion.may_be_simple
            and isinstance(backend, BuildsSoon)
            and backend.can_build(fusion.segment)
        ):
            # After any error, also in loading, a worker builds the kernel, and reports its error.
            with suppress(Exception):
                built = backend.build_soon(source)
                if built is not None:
                    backend.load(source, built)
                artifact = built
        if artifact is None:
            fusion.may_be_simple = False
            return False
        self._account(start, f"{fusion!r} by {backend.name}")
        fusion.ahead = source.digest, artifact
        return True

    def _has_kernel(self, fusion: Fusion) -> bool:
        """Whether the fusion's family has a kernel that is correct for its sizes."""
        if fusion.member is None:
            return False
        with suppress(Declined):
            return fusion.member.kernel(cast(GenericBackend, fusion.backend)) is not None
        return False

    def _obtain(self, fusion: Fusion) -> None:
        """Take the kernel from disk or build it."""
        fusion.status = "compiling"
        self._take_kernel(fusion, builds=True)
        fusion.ahead = None

    def _obtain_alone(self, fusion: Fusion) -> None:
        """The same, but after any other process that builds this kernel, to find it on disk."""
        key = self._artifact_key(fusion)
        deadline = perf_counter() + BUILD_LIMIT_S

        def gives_up() -> bool:
            return self._is_closed or perf_counter() > deadline

        with nullcontext() if key is None else self.disk.alone_with(key, gives_up):
            self._obtain(fusion)

    def _account(self, start: float, what: str) -> float:
        """Record a build that began at `start` and ends now; return its seconds."""
        seconds = perf_counter() - start
        self.counters.add("compile_s", seconds)
        self.builds.append(Build(start, seconds, what))
        return seconds

    def _take_kernel(self, fusion: Fusion, *, builds: bool) -> None:
        """Adopt the kernel of the first backend that has one; it is built only if `builds`.

        All ways in which a build can end are handled here: a kernel, Declined, a failure, or the
        service being closed.
        """
        try:
            kernel, origin = self._kernel_on_disk(fusion), "from disk"
            if kernel is None and builds:
                kernel, origin = self._build(fusion), "compiled"
            if isinstance(kernel, Prepared):
                kernel.prepare(fusion.segment)
        except Exception as error:
            is_declined = isinstance(error, Declined)
            # `close` ends the workers in the middle of a build, which is no fault of the segment
            if self._is_closed and not is_declined:
                fusion.run_op_by_op("the compile service was closed")
            elif self._pass_on(fusion, _error_text(error)):
                self._take_kernel(fusion, builds=builds)
            elif is_declined:
                fusion.give_up(_error_text(error))
            else:
                fusion.fail(_error_text(error))
        else:
            # nothing on disk, and not yet worth a build
            if kernel is None:
                fusion.count_runs(self._request)
            else:
                fusion.adopt(kernel, origin)

    def _pass_on(self, fusion: Fusion, reason: str) -> bool:
        """Give the fusion to the next backend that accepts all of its calls; False if none does.

        The next backend makes a kernel for the segment's own sizes: the fusion leaves its family.
        """
        segment = fusion.segment
        inputs = segment.inputs_of_calls
        for backend in after(fusion.backend, segment.device.type):
            if any(backend.refuses(*pair) for pair in zip(segment.calls, inputs, strict=True)):
                continue
            self.counters.add("passed_on")
            fusion.pass_on(backend, reason)
            return True
        return False

    def _artifact_key(self, fusion: Fusion, *, number: int | None = None) -> str | None:
        """The name of the fusion's artifact on disk; None if it can't be kept there.

        In a family it is that of generic kernel `number`; by default that of the next one.
        """
        backend, name = fusion.backend, fusion.source.digest
        if self.disk.is_off or not _is_portable(backend, fusion.segment):
            return None
        if fusion.member is not None:
            number = len(fusion.member.kernels) if number is None else number
            name += f" {number}" if number else ""
        return key_of(name, backend.name, backend.fingerprint())

    def _artifact_on_disk(self, fusion: Fusion) -> bytes | None:
        """The next artifact of the fusion's family, or else one of its own; None if there is none.

        A fusion with an artifact of its own leaves its family.
        """
        key = self._artifact_key(fusion)
        artifact = None if key is None else self.disk.get(key)
        if artifact is None and key is not None and fusion.member is not None:
            member, fusion.member = fusion.member, None
            artifact = self._artifact_on_disk(fusion)
            if artifact is None:
                fusion.member = member
        return artifact

    def _kernel_on_disk(self, fusion: Fusion) -> Kernel | None:
        """The fusion's kernel from disk; None if there is none, Declined if it was dropped.

        A family's kernels are loaded until one is correct for the fusion's sizes.
        """
        with nullcontext() if fusion.member is None else fusion.member.family.building:
            kernel = self._kernel_of_family(fusion)
            while kernel is None:
                artifact = self._artifact_on_disk(fusion)
                if artifact is None:
                    return None
                if artifact.startswith(DROPPED):
                    reason = artifact.removeprefix(DROPPED).decode()
                    raise Declined(f"a kernel for it was dropped: {reason}")
                try:
                    kernel = self._load(fusion, artifact)
                except Declined:
                    raise
                except Exception:
                    # the artifact is unusable: a build replaces it
                    return None
                self.counters.add("loaded")
        return kernel

    def _load(self, fusion: Fusion, artifact: bytes) -> Kernel | None:
        """The kernel from an artifact, which a family keeps for all its members.

        None if the kernel isn't correct for the fusion's sizes.
        """
        backend, member = cast(PortableBackend, fusion.backend), fusion.member
        if member is None:
            return backend.load(fusion.segment, artifact)
        with member.family.building:
            kernel = backend.load(fusion.source, artifact)
            member.kernels.append((artifact, kernel))
        return self._kernel_of_family(fusion)

    def _kernel_of_family(self, fusion: Fusion) -> Kernel | None:
        """The kernel of the fusion's family that is correct for its sizes, if there is one."""
        member = fusion.member
        if member is None:
            return None
        kernel = member.kernel(cast(GenericBackend, fusion.backend))
        # `Steps` become a program for these sizes; kernels of other backends accept all sizes
        if isinstance(kernel, Steps):
            return kernel.for_sizes(member.values, is_long=touches_much(fusion.segment))
        return kernel

    def _build(self, fusion: Fusion) -> Kernel:
        """Build the fusion's kernel, or use its family's. If that fails, build one of its own."""
        member = fusion.member
        if member is not None:
            # one member of a family builds, the others wait here and then use its kernel
            with member.family.building:
                kernel = self._kernel_of_family(fusion)
                if kernel is not None:
                    return kernel
                try:
                    return self._build_from_source(fusion)
                except Declined:
                    raise
                except Exception:
                    # The backend can't compile this structure with symbolic sizes. From now on each
                    # segment of it gets a kernel of its own.
                    member.family.is_apart = True
                    fusion.member, fusion.ahead, fusion.may_be_simple = None, None, True
        # outside the lock, as this build is for one segment only
        return self._build_from_source(fusion)

    def _build_from_source(self, fusion: Fusion) -> Kernel:
        """Build a kernel from `fusion.source`, and account for it."""
        if fusion.ahead is None:
            self._build_soon(fusion)
        backend, source = fusion.backend, fusion.source
        start, is_ahead = perf_counter(), fusion.ahead is not None
        try:
            if not _is_portable(backend, fusion.segment):
                kernel = _in_new_thread(backend.compile, source)
            else:
                loaded = self._load(fusion, self._artifact(fusion, backend))
                if loaded is None:
                    raise Declined("the kernel for its structure is not right for these sizes")
                kernel = loaded
        finally:
            # `_build_soon` has accounted for the artifact in `ahead`
            if not is_ahead:
                self._account(start, f"{fusion!r} by {backend.name}")
        self.counters.add("compiled")
        COMPILES.info("%s by %s in %.2f s", fusion, backend.name, perf_counter() - start)
        return kernel

    def _artifact(self, fusion: Fusion, backend: PortableBackend) -> bytes:
        """The artifact of the fusion's source, built in a worker if it can be, and put on disk."""
        key, source = self._artifact_key(fusion), fusion.source
        try:
            if fusion.ahead is not None and fusion.ahead[0] == source.digest:
                artifact = fusion.ahead[1]
            elif is_known_to_workers(backend):
                on_cpu = fusion.segment.device.type == "cpu"
                workers = self._workers if on_cpu else self._device_workers
                artifact = workers.build(backend, source)
            else:
                artifact = _in_new_thread(backend.build, source)
        except WorkerDied as death:
            # a crash or an endless build: no process must try it again
            if key is not None and not self._is_closed:
                self.disk.put(key, DROPPED + str(death).encode(), _description(fusion))
            raise
        if key is not None:
            self.disk.put(key, artifact, _description(fusion))
        return artifact

    def _build_dir(self) -> str | None:
        """The folder for files that all builds share, for workers; None lets the backend choose.

        Compilers load and run code from it, so nobody but this user may be able to write it. If the
        cache folder is not safe, it is a temporary folder.
        """
        folder = self.disk.work_folder("build")
        path = str(folder) if folder is not None else own_folder()
        # Inductor passes paths to the C++ compiler without quotes, so a space would split them
        return None if any(map(str.isspace, path)) else path


def _is_portable(backend: Backend, segment: Segment) -> TypeGuard[PortableBackend]:
    return isinstance(backend, PortableBackend) and backend.can_build(segment)


def _description(fusion: Fusion) -> str:
    """The description of the kernel for `cache list`: the backend and the ops."""
    ops = counted(call.op.overloadpacket.__name__ for call in fusion.segment.calls)
    return f"{fusion.backend.name}: {ops}"


_thread_lock = threading.Lock()


def _in_new_thread(function: Callable[[Segment], T], segment: Segment) -> T:
    """`function(segment)` in a new thread, where no dispatch mode of the caller is active.

    Only one such call runs at a time, since torch's tracing patches state that threads share.
    """
    with _thread_lock, ThreadPoolExecutor(1) as thread:
        return thread.submit(function, segment).result()


def _error_text(error: Exception) -> str:
    """The text for an error: its message, after its type if the error is not one of ours."""
    is_ours = isinstance(error, (BuildError, Declined))
    return str(error) if is_ours else f"{type(error).__name__}: {error}"


# weak, as `os.register_at_fork` can't be undone and would keep every service alive
_all: WeakSet[Compiler] = WeakSet()


def _after_fork_in_child() -> None:
    for compiler in list(_all):
        compiler.after_fork_in_child()


os.register_at_fork(after_in_child=_after_fork_in_child)
