"""The compile service: from a segment to a fusion, and from a fusion to a kernel, now or later.

In: segments, a backend, and how long one may wait. Out: fusions that can be run at once. Called by
`dispatch.plan`. All state that compiling needs is held by one `Compiler`.
"""

from __future__ import annotations

import threading
from collections import Counter, deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, nullcontext, suppress
from pathlib import Path
from time import perf_counter
from typing import Literal, NamedTuple, TypeGuard, TypeVar, cast
from weakref import WeakSet

import torch

from lazy_tensor.kernels.backend import (
    Backend,
    BuildsTogether,
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
from lazy_tensor.kernels.extension.pool import POOL, keep_freed_heap
from lazy_tensor.kernels.extension.program import touches_much
from lazy_tensor.kernels.library import own_folder
from lazy_tensor.kernels.logs import COMPILES
from lazy_tensor.kernels.segment import Segment, counted
from lazy_tensor.kernels.service import fork
from lazy_tensor.kernels.service.families import Families, Member
from lazy_tensor.kernels.service.fusion import Fusion
from lazy_tensor.kernels.service.jobs import Jobs
from lazy_tensor.kernels.service.progress import shown
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
_Key = tuple[Segment, Backend, int, int]

_aten = AtenBackend()

DROPPED = b"dropped: "
"""Stands, with the reason, on disk in place of a kernel that disagreed with op-by-op execution, or
whose build ended the worker."""


class Build(NamedTuple):
    """A kernel built: when it began, by `time.perf_counter`, how long it took, what it was."""

    began_s: float
    seconds: float
    what: str


MAX_WAIT_AT_THE_END_S = 10.0
MOST_BUILDS = 256


class Compiler:
    """Turns segments into fusions, at most `maxsize` of them, and obtains their kernels.

    `cache_dir` keeps kernels beyond the process; None keeps them in memory only. `n_workers` is the
    number of kernels built at a time: by default one core is left to the program. In "background"
    kernels that a segment has run often enough for are asked for once `may_build()` is true.
    """

    def __init__(
        self,
        *,
        maxsize: int = 1024,
        cache_dir: Path | None = None,
        max_disk_bytes: int = 2 << 30,
        n_workers: int | None = None,
        counters: Counters | None = None,
        may_build: Callable[[], bool] | None = None,
    ) -> None:
        self.counters = counters or Counters()
        self.builds: deque[Build] = deque(maxlen=MOST_BUILDS)  # the last ones
        self.cache: Cache[_Key, Fusion] = Cache("kernel", maxsize, self._evicted)
        self.disk = Disk(cache_dir, max_disk_bytes) if cache_dir is not None else None
        self._may_build = may_build
        self._creating = threading.Lock()
        self._families = Families(maxsize)
        self._fusions: WeakSet[Fusion] = WeakSet()
        self._workers = Workers(n_workers, self._build_dir)
        # one, as each holds a context on the device
        self._device_workers = Workers(1, self._build_dir)
        self._to_load = Jobs(self._load, n_threads=1)
        self._to_build = Jobs(self._obtain, self._workers.size, self._together)
        self._is_forked = False
        self._is_closed = False
        fork.in_child(self)
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

        "off" runs op by op. "blocking" returns when the kernel is there (or has failed), or at
        once if not `waits`: `finish` then waits for several, which are built side by side.
        "background" returns at once: the fusion runs op by op until its kernel is there, asked for
        when the fusion has been run `threshold` times, or at first sight if it lies on disk.
        `measure` makes a kernel that arrives prove itself faster than op-by-op replay: by default
        on CPU in "background".
        """
        if mode == "off" or self._is_forked or backend.name == "aten":
            return self._find(segment, _aten, 0)[0]
        for workers in (self._workers, self._device_workers):
            workers.niceness = 0 if mode == "blocking" else BEHIND
        fusion, is_new = self._find(segment, backend, verify_every)
        if is_new:
            is_timed = mode == "background" and segment.device.type == "cpu"
            fusion.measure = is_timed if measure is None else measure
            fusion.threshold = threshold
            self._join_family(fusion)
        if mode == "blocking" and fusion.status in ("aten", "queued", "compiling"):
            self._to_load.take_back(fusion)
            if waits:
                self._to_build.run_now(fusion)
            elif fusion.status == "aten":
                fusion.status = "queued"
                self._to_build.add(fusion)
        elif fusion.status != "aten":
            pass  # on its way, or there
        elif is_new and self._artifact_key(fusion) is not None:
            fusion.count_runs()
            self._to_load.add(fusion)
        elif is_new:
            fusion.count_runs(self._request)
        return fusion

    def finish(self, fusions: Sequence[Fusion]) -> None:
        """Wait until the kernels of these fusions are there, or have failed."""
        waiting = [one for one in dict.fromkeys(fusions) if one.status in ("queued", "compiling")]
        with shown(len(waiting)) as advance:
            for fusion in waiting:
                self._to_build.finish(fusion)
                advance()

    def keep_memory(self, mode: Mode, *, may_compile: bool) -> None:
        """Have plans reuse memory: now if what does it was compiled before or in "blocking", else,
        if it `may_compile`, as soon as that is compiled."""
        if mode == "off" or self._is_forked:
            return
        POOL.ask_disk(self.disk)
        if mode == "blocking" or may_compile:
            POOL.ask_for(self.disk, wait=mode == "blocking")

    def statuses(self) -> Counter[str]:
        """How many segments with a kernel, or on their way to one, are in which status."""
        found: Counter[str] = Counter(fusion.status for fusion in list(self._fusions))
        del found["aten"]
        return found

    def wait(self, timeout_s: float | None = None) -> bool:
        """Wait until nothing is left to load or build; False if that took more than `timeout_s`."""
        return self._to_load.wait(timeout_s) and self._to_build.wait(timeout_s)

    def close(self) -> None:
        """Drop what is queued and end the workers. Fusions go on running what they run."""
        self._is_closed = True
        self._to_load.close()
        self._to_build.close()
        self._workers.close()
        self._device_workers.close()

    def end(self) -> None:
        """The same at the end of the process; what is being loaded or tried is waited for."""
        self.close()
        for jobs in (self._to_load, self._to_build):
            jobs.join(MAX_WAIT_AT_THE_END_S)

    def after_fork_in_child(self) -> None:
        """Run op by op in the child: OpenMP's threads and the workers are its parent's."""
        self._is_forked = True
        self._creating = threading.Lock()
        self._to_load.forget()
        self._to_build.forget()
        self._workers.forget()
        self._device_workers.forget()
        for fusion in list(self._fusions):
            fusion.run_op_by_op("this is a forked child process")

    def _find(self, segment: Segment, backend: Backend, verify_every: int) -> tuple[Fusion, bool]:
        """The fusion in the cache, or a new one; and whether it is new."""
        # kernels are compiled for a number of threads
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
        """See that no process uses the fusion's kernel again; say what shows why."""
        if self.disk is None or self.disk.is_off:
            return ""
        key = self._artifact_key(fusion)
        if key is not None:
            self.disk.put(key, DROPPED + reason.encode(), _about(fusion))
        first = None
        if fusion.member is not None:
            family = fusion.member.family
            first, family.kernel, family.is_apart = family.first, None, True
        folder, backend = self.disk.directory / "disagreements", fusion.backend.name
        path = write_script(folder, backend, fusion.segment, first, inputs, reason)
        return "" if path is None else f"; run {path} to see it"

    def _evicted(self, key: _Key, fusion: Fusion) -> None:
        if self._to_build.take_back(fusion) or self._to_load.take_back(fusion):
            fusion.run_op_by_op("evicted from the kernel cache before it was compiled")

    def _request(self, fusion: Fusion) -> None:
        if fusion.threshold > 1 and self._may_build is not None and not self._may_build():
            return  # it asks again at its next run
        with self._creating:
            if fusion.status != "aten":
                return  # another thread ran the fusion at the same time
            fusion.status = "queued"
        self._to_build.add(fusion)

    def _join_family(self, fusion: Fusion) -> None:
        """Find out whether its family's kernel is for the fusion; take it if it is there."""
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
            fusion.n_runs = family.n_members - 1  # each of the others ran
            if family.kernel is not None and not isinstance(family.kernel, Prepared):
                fusion.adopt(self._generic_kernel(fusion, fusion.member), "of other sizes")
        except Declined as reason:
            fusion.give_up(str(reason))

    def _load(self, fusion: Fusion) -> None:
        """Take the kernel from disk; if there is none, wait for the fusion to be used enough."""
        self._take_kernel(fusion, builds=False)

    def _obtain(self, fusion: Fusion) -> None:
        """Take the kernel from disk or build it."""
        fusion.status = "compiling"
        self._take_kernel(fusion, builds=True)
        fusion.ahead = None

    @contextmanager
    def _together(self, fusions: Sequence[Fusion]) -> Iterator[None]:
        """While no other process builds what these fusions need, have it built at once."""
        keys = [key for fusion in fusions if (key := self._artifact_key(fusion)) is not None]
        deadline = perf_counter() + BUILD_LIMIT_S

        def gives_up() -> bool:
            return self._is_closed or perf_counter() > deadline

        with nullcontext() if self.disk is None else self.disk.alone_with(keys, gives_up):
            if len(fusions) > 1:
                self._build_ahead(fusions)
            yield

    def _build_ahead(self, fusions: Sequence[Fusion]) -> None:
        """Build at once what these fusions need; what fails is built alone, which tells why."""
        backend = fusions[0].backend
        if not (isinstance(backend, BuildsTogether) and is_known_to_workers(backend)):
            return
        alike = [fusion for fusion in fusions if self._is_to_build(fusion, backend)]
        sources = {fusion.source.digest: fusion.source for fusion in alike}
        if len(sources) < 2:
            return
        for fusion in fusions:
            fusion.status = "compiling"
        start = perf_counter()
        with suppress(BuildError):
            built = self._workers.build_all(backend, list(sources.values()))
            artifacts = dict(zip(sources, built, strict=True))
            for fusion in alike:
                artifact = artifacts.get(fusion.source.digest)
                if artifact is not None:
                    fusion.ahead = fusion.source.digest, artifact
        self._account(start, f"{len(sources)} segments by {backend.name}")

    def _is_to_build(self, fusion: Fusion, backend: Backend) -> bool:
        """Whether a worker on the CPU would build the fusion's kernel by `backend`."""
        key = self._artifact_key(fusion)
        return (
            fusion.backend is backend
            and fusion.segment.device.type == "cpu"
            and _is_portable(backend, fusion.segment)
            and (fusion.member is None or fusion.member.family.kernel is None)
            and (key is None or self.disk is None or self.disk.get(key) is None)
        )

    def _account(self, start: float, what: str) -> float:
        """Note a build that began at `start` and ends now; the seconds that it took."""
        seconds = perf_counter() - start
        self.counters.add("compile_s", seconds)
        self.builds.append(Build(start, seconds, what))
        return seconds

    def _take_kernel(self, fusion: Fusion, *, builds: bool) -> None:
        """Take the kernel of the first backend that has one; it is built only if `builds`."""
        try:
            kernel, origin = self._kernel_on_disk(fusion), "from disk"
            if kernel is None and builds:
                kernel, origin = self._built(fusion), "compiled"
            if isinstance(kernel, Prepared):
                kernel.prepare(fusion.segment)
        except Exception as error:
            is_declined = isinstance(error, Declined)
            if self._is_closed and not is_declined:
                fusion.run_op_by_op("the compile service was closed")
            elif self._passes_on(fusion, _told(error)):
                self._take_kernel(fusion, builds=builds)
            elif is_declined:
                fusion.give_up(_told(error))
            else:
                fusion.fail(_told(error))
        else:
            if kernel is None:
                fusion.count_runs(self._request)
            else:
                fusion.adopt(kernel, origin)

    def _passes_on(self, fusion: Fusion, reason: str) -> bool:
        """Have the next backend that takes all of the fusion's calls try, with a kernel for its
        own sizes; False if there is none."""
        segment = fusion.segment
        inputs = segment.inputs_of_calls
        for backend in after(fusion.backend, segment.device.type):
            if any(backend.refuses(*pair) for pair in zip(segment.calls, inputs, strict=True)):
                continue
            self.counters.add("passed_on")
            fusion.pass_on(backend, reason)
            return True
        return False

    def _artifact_key(self, fusion: Fusion) -> str | None:
        """The name of the fusion's artifact on disk; None if it can't be kept there."""
        backend = fusion.backend
        if self.disk is None or self.disk.is_off or not _is_portable(backend, fusion.segment):
            return None
        return key_of(fusion.source.digest, backend.name, backend.fingerprint())

    def _kernel_on_disk(self, fusion: Fusion) -> Kernel | None:
        key = self._artifact_key(fusion)
        if key is None or self.disk is None:
            return None
        artifact = self.disk.get(key)
        if artifact is None:
            return None
        if artifact.startswith(DROPPED):
            raise Declined(
                f"a kernel for it was dropped: {artifact.removeprefix(DROPPED).decode()}"
            )
        try:
            kernel = self._loaded(fusion, artifact)
        except Declined:
            raise
        except Exception:
            return None  # `load` says that it is unusable: it is built anew and replaced
        self.counters.add("loaded")
        return kernel

    def _loaded(self, fusion: Fusion, artifact: bytes) -> Kernel:
        backend, member = cast(PortableBackend, fusion.backend), fusion.member
        if member is None:
            return backend.load(fusion.segment, artifact)
        with member.family.building:
            if member.family.kernel is None:
                member.family.kernel = backend.load(fusion.source, artifact)
                member.family.artifact = artifact
        return self._generic_kernel(fusion, member)

    def _generic_kernel(self, fusion: Fusion, member: Member) -> Kernel:
        """The kernel of the fusion's family; Declined if it isn't right for its sizes."""
        family = member.family
        assert family.kernel is not None
        assert family.artifact is not None
        if not cast(GenericBackend, fusion.backend).fits(family.artifact, member.values):
            raise Declined("the kernel for its structure is not right for these sizes")
        if isinstance(family.kernel, Steps):
            is_long = touches_much(fusion.segment)
            return family.kernel.for_sizes(member.values, is_long=is_long)
        return family.kernel

    def _built(self, fusion: Fusion) -> Kernel:
        member = fusion.member
        if member is None:
            return self._built_from(fusion)
        with member.family.building:
            if member.family.kernel is not None:
                return self._generic_kernel(fusion, member)
            try:
                return self._built_from(fusion)
            except Declined:
                raise
            except Exception:
                # no kernel serves all sizes: each has its own
                member.family.is_apart = True
                fusion.member = None
        return self._built_from(fusion)

    def _built_from(self, fusion: Fusion) -> Kernel:
        backend, source = fusion.backend, fusion.source
        start = perf_counter()
        try:
            if not _is_portable(backend, fusion.segment):
                kernel = _apart(backend.compile, source)
            else:
                kernel = self._loaded(fusion, self._artifact(fusion, backend))
        finally:
            seconds = self._account(start, f"{fusion!r} by {backend.name}")
        self.counters.add("compiled")
        COMPILES.info("%s by %s in %.2f s", fusion, backend.name, seconds)
        return kernel

    def _artifact(self, fusion: Fusion, backend: PortableBackend) -> bytes:
        """Built in a worker if that knows the backend, and kept on disk."""
        key, source = self._artifact_key(fusion), fusion.source
        try:
            if fusion.ahead is not None and fusion.ahead[0] == source.digest:
                artifact = fusion.ahead[1]
            elif is_known_to_workers(backend):
                on_cpu = fusion.segment.device.type == "cpu"
                workers = self._workers if on_cpu else self._device_workers
                artifact = workers.build(backend, source)
            else:
                artifact = _apart(backend.build, source)
        except WorkerDied as death:
            # no process shall try again
            if key is not None and self.disk is not None and not self._is_closed:
                self.disk.put(key, DROPPED + str(death).encode(), _about(fusion))
            raise
        if key is not None and self.disk is not None:
            self.disk.put(key, artifact, _about(fusion))
        return artifact

    def _build_dir(self) -> str | None:
        """Where workers keep what all builds share; None leaves that to the backend.

        Compilers load what they find there: it is this user's alone.
        """
        if self.disk is None:
            return None
        folder = self.disk.work_folder("build")
        found = str(folder) if folder is not None else own_folder()
        # Inductor gives paths to the C++ compiler without quotes
        return None if any(map(str.isspace, found)) else found


def _is_portable(backend: Backend, segment: Segment) -> TypeGuard[PortableBackend]:
    return isinstance(backend, PortableBackend) and backend.can_build(segment)


def _about(fusion: Fusion) -> str:
    """What `cache list` says of its kernel: the backend and the ops, the most frequent first."""
    ops = counted(call.op.overloadpacket.__name__ for call in fusion.segment.calls)
    return f"{fusion.backend.name}: {ops}"


_turns = threading.Lock()


def _apart(function: Callable[[Segment], T], segment: Segment) -> T:
    """`function(segment)` in a thread of its own, where none of the caller's modes are active.

    One at a time: torch's tracing patches what all threads share.
    """
    with _turns, ThreadPoolExecutor(1) as thread:
        return thread.submit(function, segment).result()


def _told(error: Exception) -> str:
    """What a fusion says of `error`: its type too, unless the message is made to stand alone."""
    is_ours = isinstance(error, (BuildError, Declined))
    return str(error) if is_ours else f"{type(error).__name__}: {error}"
