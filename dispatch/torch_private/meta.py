"""What an op gives, found from metadata alone: torch's fake tensors and the device "meta"."""

from __future__ import annotations

import functools
import logging
import os
import sys
import threading
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode, UnsupportedOperatorException
from torch.utils._python_dispatch import _disable_current_modes

from lazy_tensor.dispatch.torch_private.memory import CLONES
from lazy_tensor.kernels.segment import extent

Specs = Sequence[tuple[Any, ...]]
"""`(size, stride, offset, dtype, device)` of each tensor."""

NoMetaFunction = UnsupportedOperatorException
"""What `fake_call` raises for an op without a meta function."""


class _FakeMode(FakeTensorMode):
    """torch's fake mode, which leaves CUDA's device guard alone.

    Where torch is built for CUDA and there is no GPU, torch's own mode replaces the guard for all
    threads. The new guard is freed with the thread that entered the mode, and the next backward, or
    the next fake mode, ends the process (torch 2.10).
    """

    avoid_device_init = False


@functools.cache
def _fake_mode() -> FakeTensorMode:
    with _disable_current_modes():
        mode = _FakeMode(allow_fallback_kernels=False)
    mode.cache_enabled = False  # the schema cache has the answers
    return mode


def has_fakes() -> bool:
    """Whether fake tensors can be had without a wait: for the first one torch imports its compiler
    and sympy (1.2 s)."""
    return "torch._dynamo" in sys.modules


FAKES = threading.RLock()
"""Held while fake tensors are made and used: torch's code for them is for one thread."""
# A fork waits for both. Else a child could inherit one as held by a thread that it doesn't have.
for _lock in CLONES, FAKES:
    os.register_at_fork(
        before=_lock.acquire, after_in_parent=_lock.release, after_in_child=_lock.release
    )
_fake_log = logging.getLogger("torch._subclasses.fake_tensor")


def fake_call(specs: Specs, call: Callable[[list[torch.Tensor]], Any]) -> Any:
    """What `call` gives for fake tensors of these specs.

    Raises whatever the op's meta function raises, NotImplementedError where there is none.
    """
    # torch logs the errors that it raises here. The caller expects them: eager raises them again.
    _fake_log.disabled = True
    try:
        return _fake_call(specs, call)
    finally:
        _fake_log.disabled = False


def _fake_call(specs: Specs, call: Callable[[list[torch.Tensor]], Any]) -> Any:
    with FAKES, _disable_current_modes(), torch.no_grad():
        fakes: list[torch.Tensor] = [
            FakeTensor(_fake_mode(), on_meta, spec[4])
            for on_meta, spec in zip(_on_meta(specs), specs, strict=True)
        ]
        with _fake_mode():
            return call(fakes)


def meta_call(specs: Specs, call: Callable[[list[torch.Tensor]], Any]) -> Any:
    """What `call` gives for tensors on the device "meta"."""
    with _disable_current_modes(), torch._C._AutoDispatchBelowADInplaceOrView():
        return call(_on_meta(specs))


def _on_meta(specs: Specs) -> list[torch.Tensor]:
    tensors: list[torch.Tensor] = []
    for size, stride, offset, dtype, _ in specs:
        if offset:
            whole = torch.empty(extent(size, stride) + offset, dtype=dtype, device="meta")
            tensors.append(whole.as_strided(size, stride, offset))
        else:
            tensors.append(torch.empty_strided(size, stride, dtype=dtype, device="meta"))
    return tensors
