"""Families: segments that differ only in sizes, served by two kernels.

The first segment of a structure gets a kernel of its own. All others share one kernel with symbolic
sizes, the generic kernel. In: a segment. Out: a `Member`, or None if the segment itself is to be
compiled. Called by `service.compile` for each new fusion.
"""

from __future__ import annotations

import threading
from dataclasses import dataclass, field

import torch

from lazy_tensor.kernels.backend import Backend, Declined, GenericBackend, Kernel
from lazy_tensor.kernels.cache import Cache
from lazy_tensor.kernels.generic import Generic, Structure, generic_of, structure_of
from lazy_tensor.kernels.segment import Segment


@dataclass
class Family:
    """The segments of one structure, as far as they share state.

    `first` is the first segment seen, and `structure` its structure. `generic` is made when a
    segment of other sizes comes; `kernel` and `artifact` are its kernel, once that is built.
    """

    first: Segment
    structure: Structure
    generic: Generic | None = None
    # no generic kernel serves this structure: each segment gets a kernel of its own
    is_apart: bool = False
    # segments that got a kernel of their own because it was there soon
    n_soon: int = 0
    # segments seen; `service.compile` counts them as runs of the structure
    n_members: int = 1
    artifact: bytes | None = None
    kernel: Kernel | None = None
    # Held while the generic kernel is built or loaded, so that only one member does it. A build
    # loads its artifact too, so the lock is reentrant.
    building: threading.RLock = field(default_factory=threading.RLock)


@dataclass(frozen=True, slots=True)
class Member:
    """A segment that uses its family's generic kernel, with these values of the symbols."""

    family: Family
    values: tuple[int, ...]


class Families:
    """The families of a process, at most `maxsize` of them."""

    def __init__(self, maxsize: int) -> None:
        self._known: Cache[tuple[str, Backend, int], Family] = Cache("", maxsize)
        self._lock = threading.Lock()

    def member(self, segment: Segment, backend: Backend) -> Member | None:
        """Add a new segment to its family; None if it gets a kernel of its own.

        Declined if its sizes fit neither of the family's two kernels. A third one is not built, so
        that the number of builds doesn't grow with the number of sizes.
        """
        if not (isinstance(backend, GenericBackend) and backend.can_build(segment)):
            return None
        structure = structure_of(segment)
        if structure is None:
            return None
        # kernels are compiled for a number of threads
        key = (structure.text, backend, torch.get_num_threads())
        with self._lock:
            family = self._known.get(key)
            if family is None:
                self._known.put(key, Family(segment, structure))
                return None
            family.n_members += 1
            # the second segment shows which sizes change, so only now there is a generic one
            if family.generic is None and not family.is_apart:
                family.generic = generic_of(family.structure, structure, segment)
                family.is_apart = family.generic is None
            if family.is_apart or segment == family.first:
                return None
            assert family.generic is not None
            values = family.generic.values_of(structure)
        if values is None:
            raise Declined("its structure has two kernels, and these sizes fit neither")
        return Member(family, values)
