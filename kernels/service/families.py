"""Families: segments that differ only in sizes, served by a few kernels.

The first segment of a structure gets a kernel of its own. All others share a generic kernel with
symbolic sizes, or several, if each is correct for some sizes only. In: a segment. Out: a `Member`,
or None if the segment gets its own kernel. Called by `service.compile` for each new fusion.
"""

from __future__ import annotations

import threading
from dataclasses import dataclass, field

import torch

from lazy_tensor.kernels.backend import Backend, Declined, GenericBackend, Kernel
from lazy_tensor.kernels.cache import Cache
from lazy_tensor.kernels.generic import Generic, Structure, generic_of, structure_of
from lazy_tensor.kernels.segment import Segment

MOST_EXAMPLES = 4
"""The most example segments from which one generic segment is made."""
MOST_KERNELS = 8
"""The most generic kernels of a structure. Each is correct for a range of sizes; with more, almost
every size would get a kernel of its own."""


@dataclass
class Family:
    """What the segments of one structure share.

    `examples` are the first segment, and each later one whose sizes don't fit `generic`, as where
    sizes differ that were equal in all examples before. `generic` is made from the examples, and
    `kernels` are its kernels so far, with their artifacts.
    """

    examples: list[tuple[Segment, Structure]]
    generic: Generic | None = None
    # no generic kernel serves this structure: each segment gets a kernel of its own
    is_apart: bool = False
    # segments seen, and their seconds op by op: `service.compile` counts them for the structure
    n_members: int = 1
    spent_s: float = 0.0
    kernels: list[tuple[bytes, Kernel]] = field(default_factory=list)
    # Held while a generic kernel is built or loaded, so that only one member does it. A build
    # loads its artifact too, so the lock is reentrant.
    building: threading.RLock = field(default_factory=threading.RLock)


@dataclass(frozen=True, slots=True)
class Member:
    """A segment that uses a generic kernel of its family, with these values of the symbols.

    `source` is the generic segment with this one's sizes as its example.
    """

    family: Family
    source: Generic
    values: tuple[int, ...]
    kernels: list[tuple[bytes, Kernel]]

    def kernel(self, backend: GenericBackend) -> Kernel | None:
        """The first kernel that is correct for the sizes; None if there is none so far.

        Declined if there are `MOST_KERNELS` others.
        """
        for artifact, kernel in self.kernels:
            if backend.fits(artifact, self.values):
                return kernel
        if len(self.kernels) >= MOST_KERNELS:
            raise Declined("none of the kernels for its structure is right for these sizes")
        return None


class Families:
    """The families of a process, at most `maxsize` of them."""

    def __init__(self, maxsize: int) -> None:
        self._families: Cache[tuple[str, Backend, int], Family] = Cache("", maxsize)
        self._lock = threading.Lock()

    def member(self, segment: Segment, backend: Backend) -> Member | None:
        """Add a new segment to its family; None if it gets a kernel of its own.

        Declined if its sizes don't fit the generic segment, and there are `MOST_EXAMPLES` examples.
        """
        if not (isinstance(backend, GenericBackend) and backend.can_build(segment)):
            return None
        structure = structure_of(segment)
        if structure is None:
            return None
        # kernels are compiled for a number of threads
        key = (structure.text, backend, torch.get_num_threads())
        with self._lock:
            family = self._families.get(key)
            if family is None:
                self._families.put(key, Family([(segment, structure)]))
                return None
            family.n_members += 1
            # the first example has a kernel for its own sizes
            if family.is_apart or segment == family.examples[0][0]:
                return None
            values = None if family.generic is None else family.generic.values_of(structure)
            if values is None:
                # a new example: it shows which sizes change, and which are not always equal
                values = self._with_example(family, segment, structure).own_values
            assert family.generic is not None
            source = family.generic.of(segment, structure)
            return Member(family, source, values, family.kernels)

    def _with_example(self, family: Family, segment: Segment, structure: Structure) -> Generic:
        """The generic segment of the examples and this segment, which becomes an example."""
        if len(family.examples) >= MOST_EXAMPLES:
            raise Declined("its sizes relate to one another in too many ways")
        family.examples.append((segment, structure))
        family.generic = generic_of([example for _, example in family.examples], segment)
        # a new list, as other members may still add kernels of the generic segment before
        family.kernels = []
        return family.generic
