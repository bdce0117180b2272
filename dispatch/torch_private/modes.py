"""Dispatch modes and dispatch keys: what sees an op, and contexts in which less does."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from typing import Any

import torch
from torch._C import DispatchKey
from torch._ops import _len_torch_dispatch_stack_pre_dispatch
from torch.autograd import forward_ad
from torch.utils._python_dispatch import (
    TorchDispatchMode as TorchDispatchMode,
    _disable_current_modes,
)

from lazy_tensor.dispatch.torch_private.autograd import saves_by_hooks

below_autograd: Callable[[], Any] = torch._C._AutoDispatchBelowADInplaceOrView
"""Context manager: autograd sees no op, so there is no graph and no write is counted."""

no_dispatch: Callable[[], Any] = torch._C._DisableTorchDispatch
"""Context manager: neither modes nor tensor subclasses see ops."""


def no_inference() -> AbstractContextManager[Any]:
    """Context manager: new tensors are no inference tensors, even in `torch.inference_mode()`."""
    if not torch.is_inference_mode_enabled():
        return _NOTHING
    return torch._C._InferenceMode(False)


def no_modes() -> AbstractContextManager[Any]:
    """Context manager: no dispatch mode sees ops. Tensor subclasses still do."""
    if not is_mode_entered() and not _len_torch_dispatch_stack_pre_dispatch():
        return _NOTHING  # it costs 6 us less
    return _disable_current_modes()


_NOTHING: AbstractContextManager[Any] = nullcontext()


RANGE_BEGINS = torch.ops.profiler._record_function_enter_new.default
RANGE_OPS = frozenset({RANGE_BEGINS, torch.ops.profiler._record_function_exit._RecordFunction})
"""The ops that `torch.profiler.record_function` calls where it begins and ends."""


def is_profiled() -> bool:
    """Whether torch's profiler records what this thread does."""
    return bool(torch._C._autograd._profiler_enabled())


def is_mode_entered() -> bool:
    """Whether a dispatch mode would see the next op. A mode whose handler runs doesn't count."""
    return bool(torch._C._len_torch_dispatch_stack())


def _key_sets() -> tuple[Any, ...]:
    """Three sets of dispatch keys: those included by default, those excluded below autograd and
    autocast, and those excluded below modes and subclasses too."""
    # from a new thread, in which the program has set nothing
    found: list[Any] = []

    def look() -> None:
        found.append(torch._C._dispatch_tls_local_include_set())
        with torch._C._DisableAutocast(), torch._C._AutoDispatchBelowADInplaceOrView():
            found.append(torch._C._dispatch_tls_local_exclude_set())
            with torch._C._DisableTorchDispatch():
                found.append(torch._C._dispatch_tls_local_exclude_set())

    thread = threading.Thread(target=look)
    thread.start()
    thread.join()
    return tuple(found)


_INCLUDED, _BELOW_AUTOGRAD, _KERNELS = _key_sets()
KERNEL_KEYS: tuple[int, int] = (_INCLUDED.raw_repr(), _KERNELS.raw_repr())
"""The keys that `kernels_only()` includes and excludes, as numbers for C++."""


def kernels_only(*, dispatches: bool = False) -> AbstractContextManager[Any]:
    """Context manager: ops go straight to kernels, without a graph or autocast.

    With `dispatches` modes and subclasses still see them. Without, new tensors are no inference
    tensors.
    """
    # The whole sets are put in force, not a few keys excluded. While a mode or a subclass handles
    # an op torch leaves out keys by which `conj()` works, and kernels may use that.
    excluded = _BELOW_AUTOGRAD if dispatches else _KERNELS
    guard: AbstractContextManager[Any] = torch._C._ForceDispatchKeyGuard(_INCLUDED, excluded)
    if dispatches or not torch.is_inference_mode_enabled():
        return guard
    return _ordinary(guard)


@contextmanager
def _ordinary(guard: AbstractContextManager[Any]) -> Iterator[None]:
    with no_inference(), guard:
        yield


def only_mode_is(own: type[Any]) -> bool:
    """Whether no mode of another class than `own` is active, and neither a transform of
    `torch.func` nor forward-mode differentiation."""
    n_modes = torch._C._len_torch_dispatch_stack()
    return (
        all(type(torch._C._get_dispatch_stack_at(i)) is own for i in range(n_modes))
        and torch._C._functorch.maybe_current_level() is None
        and forward_ad._current_level < 0
    )


_VMAP: Any = torch._C._parse_dispatch_key("VmapMode")
"""The key of the `vmap` that runs a backward pass with `is_grads_batched`."""


def is_in_vmap() -> bool:
    """Whether this `vmap`, or a transform of `torch.func` such as its `vmap`, is active."""
    is_one = torch._C._functorch.maybe_current_level() is not None
    return is_one or torch._C._dispatch_tls_local_include_set().has(_VMAP)


@contextmanager
def outside_vmap() -> Iterator[None]:
    """Context manager: no `vmap`, and no other transform of `torch.func`, sees ops."""
    with ExitStack() as entered:
        entered.enter_context(torch._C._ExcludeDispatchKeyGuard(torch._C.DispatchKeySet(_VMAP)))
        if torch._C._functorch.maybe_current_level() is not None:
            from torch._functorch.pyfunctorch import temporarily_clear_interpreter_stack

            entered.enter_context(temporarily_clear_interpreter_stack())
        yield


def is_watched(own: type[Any], *, saves: bool) -> str | None:
    """What, besides a mode of class `own`, sees calls of ops or functions; None if nothing does.
    With `saves` hooks for the tensors that autograd saves count too."""
    n_modes = torch._C._len_torch_dispatch_stack()
    modes = [torch._C._get_dispatch_stack_at(i) for i in range(n_modes)]
    if not all(type(mode) is own for mode in modes):
        return "another dispatch mode is active"
    if torch._C._len_torch_function_stack():
        return "a TorchFunctionMode is active (torch.set_default_device is one)"
    if torch._C._functorch.maybe_current_level() is not None:
        return "a transform of torch.func is active"
    if saves and saves_by_hooks():
        return "hooks for saved tensors are active"
    if forward_ad._current_level >= 0:
        return "forward-mode differentiation is active"
    return None


def are_modes_put_aside() -> bool:
    """Whether no mode would see the next op of this thread, ours neither."""
    return not is_mode_entered() or bool(
        torch._C._dispatch_tls_is_dispatch_key_excluded(DispatchKey.Python)
    )


push_mode: Callable[[TorchDispatchMode], None] = torch._C._push_on_torch_dispatch_stack
"""Enter this dispatch mode: it sees all ops of this thread first."""
pop_mode: Callable[[None], TorchDispatchMode] = torch._C._pop_torch_dispatch_stack
"""Leave the mode that was entered last, and return it. The argument is None."""


def is_innermost_mode(mode: TorchDispatchMode) -> bool:
    """Whether `mode` sees the ops of this thread first."""
    n_modes = torch._C._len_torch_dispatch_stack()
    return n_modes > 0 and torch._C._get_dispatch_stack_at(n_modes - 1) is mode


def is_own_mode_entered() -> bool:
    """Whether one of torch's own modes is active in this thread: fake tensors, functionalization,
    proxies."""
    mode = torch._C._get_dispatch_mode
    return not (mode(_FAKE) is None and mode(_FUNCTIONAL) is None and mode(_PROXY) is None)


_KEYS = torch._C._TorchDispatchModeKey
_FAKE, _FUNCTIONAL, _PROXY = _KEYS.FAKE, _KEYS.FUNCTIONAL, _KEYS.PROXY
