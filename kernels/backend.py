"""The protocol of a backend, and the registry that `backend=` names.

In: segments. Out: kernels. `plan.partition` asks `refuses`, `service.compile` the
rest.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol, runtime_checkable

import torch

from lazy_tensor.kernels.segment import Call, Segment, TensorSpec

Kernel = Callable[[Sequence[torch.Tensor], Sequence[float]], Sequence[torch.Tensor]]
"""`kernel(tensors, scalars) -> outputs`: plain tensors in, in the segment's order; its outputs out.

Runs below autograd and outside every dispatch mode; writes the inputs that the segment writes.
"""


class Declined(RuntimeError):
    """No kernel is for a segment, which is no failure: the message says why."""


class Busy(RuntimeError):
    """Another thread is preparing the kernel; nothing was run."""


@runtime_checkable
class Prepared(Protocol):
    """A kernel that takes long when it first sees a segment's sizes.

    It raises Busy if it is called meanwhile.
    """

    def prepare(self, segment: Segment) -> None:
        """Get ready for the sizes of `segment`, without keeping other threads from running."""


@runtime_checkable
class Backend(Protocol):
    """Turns segments into kernels. `name` is what `configure(backend=...)` takes."""

    name: str

    def unavailable(self, device_type: str) -> str | None:
        """Why this backend can't run on `device_type` here; None if it can."""

    def refuses(self, call: Call, inputs: Sequence[TensorSpec] = ()) -> str | None:
        """Why `call` can't be part of a segment; None if it can.

        `inputs` are the tensors it takes, in order; none where they aren't known. Must be cheap:
        asked for every node of a new plan.
        """

    def compile(self, segment: Segment) -> Kernel:
        """The kernel for `segment`. May take seconds; any exception sends the segment to the next
        backend, or to `aten`, which warns unless it is a Declined."""


@runtime_checkable
class PortableBackend(Backend, Protocol):
    """A backend whose work can be done in another process and kept on disk."""

    def can_build(self, segment: Segment) -> bool:
        """Whether `build` can make an artifact of `segment`; else `compile` runs right here."""

    def fingerprint(self) -> str:
        """All that an artifact depends on besides the segment: versions, CPU or GPU capability."""

    def build(self, segment: Segment) -> bytes:
        """The compiled artifact; runs in a worker process."""

    def load(self, segment: Segment, artifact: bytes) -> Kernel:
        """The kernel from what `build` made, in milliseconds; raises if that is unusable."""


@runtime_checkable
class GenericBackend(PortableBackend, Protocol):
    """A portable backend whose `build` and `load` take a `Generic` segment too."""

    def fits(self, artifact: bytes, values: Sequence[int]) -> bool:
        """Whether the artifact of a generic segment is right for these values of its symbols."""


@runtime_checkable
class BuildsTogether(PortableBackend, Protocol):
    """A portable backend that makes several artifacts in less time than one by one."""

    def build_all(self, segments: Sequence[Segment]) -> list[bytes | None]:
        """What `build` would make of each; None of those whose error `build` is to tell."""


@runtime_checkable
class Thrifty(Protocol):
    """A backend whose kernels don't pay for every segment."""

    def declines(self, segment: Segment) -> str | None:
        """Why op-by-op execution is better for `segment`; None if a kernel is."""


@runtime_checkable
class CountsPaths(Protocol):
    """A backend whose time grows with the paths from a segment's inputs to its values."""

    max_paths: int
    """How many may lead to one value."""

    def paths(self, call: Call) -> int:
        """By how many of them an operand of `call` reaches its result."""


_backends: dict[str, Backend] = {}


def register_backend(name: str, backend: Backend) -> None:
    """Make `backend` known as `name`, replacing one of that name.

    Raises TypeError if it lacks a method of `Backend`.
    """
    if not isinstance(backend, Backend):
        wanted = ("name", "unavailable", "refuses", "compile")
        missing = [m for m in wanted if not hasattr(backend, m)]
        raise TypeError(
            f"register_backend({name!r}): {type(backend).__name__} lacks {', '.join(missing)}; "
            "see lazy_tensor.kernels.Backend for what a backend implements"
        )
    _backends[name] = backend


def backend_of(name: str) -> Backend:
    """The backend registered as `name`; ValueError names those there are."""
    try:
        return _backends[name]
    except KeyError:
        known = ", ".join(repr(n) for n in ("auto", *_backends))
        raise ValueError(f"backend={name!r} is not one of {known}") from None


def available_backends(device_type: str = "cpu") -> dict[str, str | None]:
    """`{name: None, or why it can't run}` for `device_type`, in the order of `"auto"`."""
    return {name: backend.unavailable(device_type) for name, backend in _backends.items()}


def after(backend: Backend, device_type: str) -> list[Backend]:
    """Who else may fuse on `device_type` what `backend` can't, in the order of `"auto"`."""
    names = list(_backends)
    later = names[names.index(backend.name) + 1 :] if backend.name in names else []
    others = [_backends[name] for name in later if name != "aten"]
    return [other for other in others if other.unavailable(device_type) is None]


def choose(name: str, device_type: str) -> Backend:
    """The backend that `configure(backend=name)` means on `device_type`.

    Where the one named can't run, and for `"auto"`, it is the first that can: a program that uses
    nvFuser on CUDA may compute on the CPU too.
    """
    if name != "auto" and backend_of(name).unavailable(device_type) is None:
        return _backends[name]
    # there is one: aten runs everywhere
    return next(b for b in _backends.values() if b.unavailable(device_type) is None)
