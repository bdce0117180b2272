"""The protocols that a backend implements, and the registry of backends by name.

A backend turns segments into kernels. `dispatch.plan.partition` calls `refuses` (and `paths`) while
it cuts a graph into segments. `service.compile` calls the other methods to get kernels. Only
`Backend` is required: each further protocol is optional and found by `isinstance`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol, runtime_checkable

import torch

from lazy_tensor.kernels.segment import Call, Segment, TensorSpec

Kernel = Callable[[Sequence[torch.Tensor], Sequence[float]], Sequence[torch.Tensor]]
"""`kernel(tensors, scalars) -> outputs`: takes the segment's inputs as plain tensors, in its order,
and returns the segment's outputs.

It runs below autograd and outside every dispatch mode. It writes the segment's written inputs in
place.
"""


class Declined(RuntimeError):
    """A backend has no kernel for a segment, for a known reason that the message gives.

    This is not a failure: the segment runs op by op, or on the next backend, without a warning.
    """


class Busy(RuntimeError):
    """The kernel is in use by another thread, which prepares or runs it; nothing was run.

    `Fusion` then runs the segment op by op this once.
    """


@runtime_checkable
class Prepared(Protocol):
    """A kernel whose first run on new sizes is slow, because it compiles for them.

    The compile service calls `prepare` in the background. A call of the kernel in the meantime
    raises Busy.
    """

    def prepare(self, segment: Segment) -> None:
        """Compile for the sizes of `segment`. Other threads of Python can run meanwhile."""


@runtime_checkable
class Backend(Protocol):
    """Turns segments into kernels. `name` is its name in `configure(backend=...)`."""

    name: str

    def unavailable(self, device_type: str) -> str | None:
        """Why this backend can't run on `device_type` here; None if it can."""

    def refuses(self, call: Call, inputs: Sequence[TensorSpec] = ()) -> str | None:
        """Why `call` can't be part of a segment; None if it can.

        `inputs` are the specs of the call's tensor arguments, in order, or empty if they aren't
        known. It is called for every node of a new plan, so it must be cheap.
        """

    def compile(self, segment: Segment) -> Kernel:
        """The kernel for `segment`; may take seconds.

        After any exception the next backend is tried, and after the last one the segment runs op
        by op. A warning is then given, unless the last exception is a Declined.
        """


@runtime_checkable
class PortableBackend(Backend, Protocol):
    """A backend that can compile in another process, to bytes that are kept on disk."""

    def can_build(self, segment: Segment) -> bool:
        """Whether `build` supports `segment`; else `compile` runs in this process."""

    def fingerprint(self) -> str:
        """All that an artifact depends on besides the segment: versions, CPU or GPU capability.

        It is part of the artifact's key on disk: what it leaves out can load a wrong kernel.
        """

    def build(self, segment: Segment) -> bytes:
        """The compiled artifact; runs in a worker process."""

    def load(self, segment: Segment, artifact: bytes) -> Kernel:
        """The kernel from an artifact of `build`, in milliseconds; raises if it is unusable."""


@runtime_checkable
class GenericBackend(PortableBackend, Protocol):
    """A portable backend whose `build` and `load` accept a `Generic` segment too."""

    def fits(self, artifact: bytes, values: Sequence[int]) -> bool:
        """Whether a generic segment's artifact is correct for these values of its symbols."""


@runtime_checkable
class BuildsSoon(PortableBackend, Protocol):
    """A portable backend that builds simple segments in a fraction of a second."""

    def build_soon(self, segment: Segment) -> bytes | None:
        """The artifact of `segment`, for its own sizes; None if it isn't simple, for `build`.

        It runs in a thread of this process.
        """


@runtime_checkable
class Thrifty(Protocol):
    """A backend that can tell, before it compiles, that a kernel would be slower than aten ops."""

    def declines(self, segment: Segment) -> str | None:
        """Why op-by-op execution is faster for `segment`; None if a kernel is."""


@runtime_checkable
class CountsPaths(Protocol):
    """A backend whose compile time grows with the number of data-flow paths in a segment.

    `dispatch.plan.partition` ends a segment before more than `max_paths` paths lead from its inputs
    to one of its values.
    """

    max_paths: int
    """The most paths from the segment's inputs to one value."""

    def paths(self, call: Call) -> int:
        """The number of paths from an operand of `call` to its result, inside the call."""


# in order of registration, which is the order in which "auto" tries them
_backends: dict[str, Backend] = {}


def register_backend(name: str, backend: Backend) -> None:
    """Register `backend` as `name`, in place of any backend of that name.

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
    """The backend registered as `name`; a ValueError lists the registered names."""
    try:
        return _backends[name]
    except KeyError:
        known = ", ".join(repr(n) for n in ("auto", *_backends))
        raise ValueError(f"backend={name!r} is not one of {known}") from None


def available_backends(device_type: str = "cpu") -> dict[str, str | None]:
    """`{name: None, or why it can't run}` for `device_type`, in the order of `"auto"`."""
    return {name: backend.unavailable(device_type) for name, backend in _backends.items()}


def after(backend: Backend, device_type: str) -> list[Backend]:
    """The available backends after `backend` in the order of `"auto"`, for segments it failed at.

    `aten` is left out: it fuses nothing, and is the fallback of every fusion anyway.
    """
    names = list(_backends)
    later = names[names.index(backend.name) + 1 :] if backend.name in names else []
    others = [_backends[name] for name in later if name != "aten"]
    return [other for other in others if other.unavailable(device_type) is None]


def choose(name: str, device_type: str) -> Backend:
    """The backend for `device_type` under `configure(backend=name)`.

    For `"auto"`, and where the named backend can't run, it is the first available one. For example,
    a program with backend="nvfuser" may compute on the CPU too.
    """
    if name != "auto" and backend_of(name).unavailable(device_type) is None:
        return _backends[name]
    # `next` always finds one, because aten runs on every device
    return next(b for b in _backends.values() if b.unavailable(device_type) is None)
