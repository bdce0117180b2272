"""What ops depend on besides their arguments: global settings, autocast, random generators.

`environment()` is part of what keeps programs apart in the trie. When one of its parts changes, a
trace must be flushed before and start anew after: `around_environment_changes` sees to that.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch


def generator_states() -> tuple[tuple[torch.Generator, torch.Tensor], ...]:
    """torch's own random generators, of the CPU and the current GPU, with their states."""
    known = [torch.default_generator]
    if torch.cuda.is_initialized():
        known.append(torch.cuda.default_generators[torch.cuda.current_device()])
    return tuple([(generator, generator.get_state()) for generator in known])


@contextmanager
def generators_at(states: Iterable[tuple[torch.Generator, torch.Tensor]]) -> Iterator[None]:
    """Context manager: generators draw from these states inside, and are put back at the end."""
    before = [(generator, generator.get_state()) for generator, _ in states]
    try:
        for generator, state in states:
            generator.set_state(state)
        yield
    finally:
        for generator, state in before:
            generator.set_state(state)


def generator_id(generator: torch.Generator) -> int:
    """A number that two Python objects for the same random generator share."""
    number: int = generator._cdata  # type: ignore[attr-defined]
    return number


ENVIRONMENT_SETTERS = tuple(
    name
    for name in (
        "_set_default_dtype",
        "_set_default_tensor_type",
        "_set_deterministic_algorithms",
        "_set_deterministic_fill_uninitialized_memory",
        "_set_float32_matmul_precision",
        "_set_fp32_precision_setter",
        "_set_blas_preferred_backend",
        "_set_linalg_preferred_backend",
        "_set_cublas_allow_tf32",
        "_set_cublas_allow_fp16_reduced_precision_reduction",
        "_set_cublas_allow_bf16_reduced_precision_reduction",
        "_set_cublas_allow_fp16_accumulation",
        "_set_cpu_allow_fp16_reduced_precision_reduction",
        "_set_cudnn_allow_tf32",
        "_set_cudnn_benchmark",
        "_set_cudnn_deterministic",
        "_set_cudnn_enabled",
        "_set_mkldnn_enabled",
        "_set_mkldnn_deterministic",
        "_set_onednn_allow_tf32",
        "_set_nnpack_enabled",
        "set_flush_denormal",
        "set_num_threads",
        # no settings, but what was recorded under a stream must run under it
        "_cuda_setStream",
        "_accelerator_setStream",
    )
    if hasattr(torch._C, name)
)
"""Functions of `torch._C` that are no ops and change what later ops compute. Not every version of
torch has all of them."""


def around_environment_changes(
    before: Callable[[], None], after: Callable[[], None], before_inference: Callable[[], None]
) -> None:
    """Have these called before and after each later change of the environment, the last one before
    those of inference mode."""
    # torch's own Python looks the setters up in `torch._C` at each call. `torch` has some too.
    for name in ENVIRONMENT_SETTERS:
        own = getattr(torch._C, name)
        made = _surrounded(own, before, after)
        for module in (torch._C, torch):
            if getattr(module, name, None) is own:
                setattr(module, name, made)
    blocks: list[tuple[Any, Callable[[], None]]] = [(torch.inference_mode, before_inference)]
    if hasattr(torch.cuda.Stream, "__enter__"):  # `with stream:`, which C++ enters
        blocks.append((torch.cuda.Stream, before))
    for block, first in blocks:
        block.__enter__ = _surrounded(block.__enter__, first, after)
        block.__exit__ = _surrounded(block.__exit__, first, after, always=True)


def _surrounded(
    setter: Callable[..., Any],
    before: Callable[[], None],
    after: Callable[[], None],
    *,
    always: bool = False,
) -> Callable[..., Any]:
    """`setter` with these calls around it. If `before` raises, `setter` runs only if `always`: as
    the `__exit__` of a block it must."""

    @functools.wraps(setter)
    def surrounded(*args: Any, **kwargs: Any) -> Any:
        try:
            before()
        except BaseException:
            if always:
                setter(*args, **kwargs)
                after()
            raise
        try:
            return setter(*args, **kwargs)
        finally:
            after()

    return surrounded


_AUTOCAST_DEVICES = ("cpu", "cuda")
Autocast = tuple[tuple[bool, torch.dtype], ...]


def autocast_state() -> Autocast:
    """Whether autocast is on, and its dtype, for the CPU and for CUDA."""
    return tuple([
        (torch.is_autocast_enabled(device), torch.get_autocast_dtype(device))
        for device in _AUTOCAST_DEVICES
    ])  # fmt: skip


@contextmanager
def autocast_as(state: Autocast) -> Iterator[None]:
    """Context manager: autocast is as it was when `autocast_state()` gave this state."""
    with ExitStack() as stack:
        for device, (enabled, dtype) in zip(_AUTOCAST_DEVICES, state, strict=True):
            if enabled or torch.is_autocast_enabled(device):
                stack.enter_context(torch.autocast(device, dtype, enabled))
        yield


_FP32_PRECISIONS = (
    ("generic", "all"), ("cuda", "matmul"), ("cuda", "conv"), ("cuda", "rnn"),
    ("mkldnn", "matmul"), ("mkldnn", "conv"), ("mkldnn", "rnn"),
)  # fmt: skip


def environment() -> tuple[object, ...]:
    """What an op's result depends on besides its arguments, below autograd and autocast. What they
    add is in the ops that are recorded."""
    return (
        torch.get_default_dtype(),
        torch.are_deterministic_algorithms_enabled(),
        # the older getters raise if these have been set to what the older setters couldn't
        *(torch._C._get_fp32_precision_getter(*which) for which in _FP32_PRECISIONS),
        torch._C._get_mkldnn_enabled(),
        torch.is_inference_mode_enabled(),
    )
