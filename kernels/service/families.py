"""Families: segments that differ in sizes only, and the two kernels that serve them all.

In: a segment. Out: what is to be compiled for it: itself if it is the first of its structure, else
the structure's generic segment.
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
    """Segments of one structure. `kernel` and `artifact` are the generic one's, once it is built.

    `is_apart`: nothing serves them all, each has a kernel of its own.
    """

    first: Segment
    structure: Structure
    generic: Generic | None = None
    is_apart: bool = False
    n_members: int = 1
    artifact: bytes | None = None
    kernel: Kernel | None = None
    building: threading.RLock = field(default_factory=threading.RLock)


@dataclass(frozen=True, slots=True)
class Member:
    """A segment that its family's generic kernel is for: `values` are the symbols' for it."""

    family: Family
    values: tuple[int, ...]


class Families:
    """The families of a process, at most `maxsize` of them."""

    def __init__(self, maxsize: int) -> None:
        self._known: Cache[tuple[str, Backend, int], Family] = Cache("", maxsize)
        self._lock = threading.Lock()

    def member(self, segment: Segment, backend: Backend) -> Member | None:
        """The place of `segment`, which was not seen before; None if it has a kernel of its own.

        Declined if its family has two kernels already, and neither is for its sizes.
        """
        if not (isinstance(backend, GenericBackend) and backend.can_build(segment)):
            return None
        structure = structure_of(segment)
        if structure is None:
            return None
        key = (structure.text, backend, torch.get_num_threads())
        with self._lock:
            family = self._known.get(key)
            if family is None:
                self._known.put(key, Family(segment, structure))
                return None
            family.n_members += 1
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
