"""Output metadata: what an op gives, known from its inputs' metadata by an LRU of answers.

In: an op, `(size, stride, offset, dtype, device)` of each tensor, static arguments. Out: `Outcome`.
A miss asks the op's meta function through fake tensors (50-100 us).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cache, lru_cache
from typing import Any

import torch

from lazy_tensor.dispatch import settings, torch_private
from lazy_tensor.dispatch.ops.schema import OpFacts
from lazy_tensor.dispatch.wording import with_article
from lazy_tensor.kernels.cache import Cache
from lazy_tensor.kernels.segment import Ref

Meta = tuple[Any, ...]
"""`(size, stride, offset, dtype, device)` of a strided tensor."""


@dataclass(frozen=True, slots=True)
class Outcome:
    """What a call gives. `runs_now` says why it can't be recorded; else `outs` are its tensors."""

    runs_now: str | None = None
    outs: tuple[Meta | None, ...] = ()
    is_single: bool = True
    container: type = tuple


LEARNED = "it runs once to tell the metadata of what it gives"
"""Why an op runs now that is recorded from then on: torch's compiler, which is imported for fake
tensors, would take longer than a program of seconds."""

_schema_cache: Cache[tuple[Any, ...], Outcome] = Cache("schema", 16384)
settings.on_change(lambda new: _schema_cache.resize(new.schema_cache_size))


@lru_cache(4096)
def dense_stride(size: tuple[int, ...]) -> tuple[int, ...]:
    """The strides of a contiguous tensor of this size."""
    stride, step = [], 1
    for n in reversed(size):
        stride.append(step)
        step *= max(n, 1)
    return tuple(reversed(stride))


def is_dense(size: Sequence[int], stride: Sequence[int]) -> bool:
    """Whether the elements fill a stretch of memory, each place once."""
    expected = 1
    for step, n in sorted(zip(stride, size, strict=True)):
        if n != 1:
            if step != expected:
                return False
            expected *= n
    return True


def meta_of(tensor: torch.Tensor) -> Meta:
    return (tensor.shape, tensor.stride(), tensor.storage_offset(), tensor.dtype, tensor.device)


def known_outcome(key: tuple[Any, ...]) -> Outcome | None:
    """The outcome under `key` if it is known."""
    return _schema_cache.get(key)


def learn(key: tuple[Any, ...], outcome: Outcome) -> Outcome:
    _schema_cache.put(key, outcome)
    return outcome


def propagate(
    facts: OpFacts, args: tuple[Any, ...], kwargs: tuple[tuple[str, Any], ...], metas: list[Meta]
) -> Outcome:
    """The outcome by the op's meta function.

    `args` and `kwargs` name tensors as `Ref(i)` of `metas`. Where there is no answer
    (data-dependent, no meta function, or an error that only eager may word) the op runs now.
    """

    def call(stand_ins: list[torch.Tensor]) -> Any:
        plain_args = [substituted(a, stand_ins) for a in args]
        return facts.op(*plain_args, **{name: substituted(a, stand_ins) for name, a in kwargs})

    try:
        if not needs_fakes(facts, metas):
            found = outcome_of(torch_private.meta_call(metas, call), facts, metas[0][4])
        else:
            with torch_private.FAKES:  # one says it's on "meta" while another one is asked
                found = outcome_of(torch_private.fake_call(metas, call), facts)
        return _masked(found, facts, args, kwargs)
    except torch_private.NoMetaFunction:
        if facts.returns_nothing and facts.writes:
            return Outcome()
        return Outcome(runs_now="torch has no meta function for it")
    except Exception as error:
        # Whatever the reason, eager has the last word: it runs the op, or raises its own error.
        return Outcome(runs_now=f"its meta function raised {with_article(type(error).__name__)}")


def _masked(
    outcome: Outcome, facts: OpFacts, args: tuple[Any, ...], kwargs: tuple[tuple[str, Any], ...]
) -> Outcome:
    """`outcome` without the gradients that nobody asked for: kernels give none, whatever meta
    functions say."""
    if "output_mask" not in facts.argument_names:
        return outcome
    place = facts.argument_names.index("output_mask")
    mask = args[place] if place < len(args) else dict(kwargs).get("output_mask")
    if mask is None or len(mask) != len(outcome.outs):
        return outcome
    outs = tuple(out if wanted else None for out, wanted in zip(outcome.outs, mask, strict=True))
    return replace(outcome, outs=outs)


def needs_fakes(facts: OpFacts, metas: list[Meta]) -> bool:
    """Whether only a fake tensor can say what the op gives: its meta function is in Python."""
    return len({meta[4] for meta in metas}) != 1 or not has_native_meta(facts)


@cache
def has_native_meta(facts: OpFacts) -> bool:
    """Whether torch's C++ tells the op's metadata: views, and what shares its code with kernels.

    That takes 1-10 us, and can't depend on the device, as some meta functions in Python do.
    """
    return facts.is_view or torch_private.has_cpp_meta_kernel(facts.op)


def outcome_of(result: Any, facts: OpFacts, device: torch.device | None = None) -> Outcome:
    """The outcome that a result shows: real, fake, or on "meta" in place of `device`."""
    if facts.returns_nothing or facts.returns_arg is not None:
        return Outcome()
    if isinstance(result, torch.Tensor):
        results, is_single = [result], True
    elif isinstance(result, (list, tuple)):
        results, is_single = list(result), False
        if len(results) == 1 and isinstance(results[0], (list, tuple)):
            return Outcome(runs_now="returns a nested list")
    else:
        return Outcome(runs_now="returns no tensor")
    for tensor in results:
        if tensor is not None and not is_recordable(tensor, allow_meta=device is not None):
            return Outcome(runs_now="gives a tensor that is not dense")
    outs = tuple(
        None if t is None else (*meta_of(t)[:4], device or _without_index(t.device))
        for t in results
    )
    return Outcome(
        outs=outs, is_single=is_single, container=list if isinstance(result, list) else tuple
    )


def _without_index(device: torch.device) -> torch.device:
    """The device as tensors have it: there is one CPU, whatever number it was asked for by."""
    return CPU if device.type == "cpu" else device


CPU = torch.device("cpu")


def is_recordable(tensor: Any, *, allow_meta: bool = False) -> bool:
    """Whether a tensor is of the kind that traces hold: strided, with memory, not quantized."""
    return (
        isinstance(tensor, torch.Tensor)
        and tensor.layout is torch.strided
        and not tensor.is_quantized
        and (allow_meta or not tensor.is_meta)
        and not tensor.is_nested
        and not torch_private.is_zero_tensor(tensor)
    )


def is_marked(tensor: torch.Tensor) -> bool:
    """Whether the tensor stands for the conjugate, or the negative, of what its memory holds."""
    return tensor.is_conj() or tensor.is_neg()


def substituted(argument: Any, tensors: list[torch.Tensor]) -> Any:
    """`argument` with each `Ref(i)` replaced by `tensors[i]`, tuples as lists."""
    if isinstance(argument, Ref):
        return tensors[argument.index]
    if type(argument) is tuple:
        return [substituted(a, tensors) for a in argument]
    return argument
