"""Output metadata by torch's meta functions, and the LRU cache of all such answers.

In: an op, `(size, stride, offset, dtype, device)` of each tensor, static arguments. Out: `Outcome`.
`record.extend_trie` looks the key up by `known_outcome`, and calls `propagate` where it is new.
Fake tensors take 50-100 us an op, meta functions in C++ 1-10 us.
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
from lazy_tensor.kernels.segment import substituted

Meta = tuple[Any, ...]
"""`(size, stride, offset, dtype, device)` of a strided tensor."""


@dataclass(frozen=True, slots=True)
class Outcome:
    """The outputs of a call, or why it can't be recorded.

    `runs_now` is that reason. Else `outs` has the metadata of each output, None for one that the op
    leaves undefined. `is_single`: the op returns one tensor, not a `container` of them. An op that
    returns nothing, or an argument that it wrote, has no outputs.
    """

    runs_now: str | None = None
    outs: tuple[Meta | None, ...] = ()
    is_single: bool = True
    container: type = tuple


OUT_DIFFERS = "its out= has another size, other strides or another dtype than its result"
"""The reason of a call that resizes its `out`, casts to it, or raises."""
LEARNED = "it runs once to tell the metadata of what it gives"
"""The reason of an op that runs now and is recorded from then on. Fake tensors would tell its
metadata, but to import torch's compiler for them takes longer than many programs."""

_schema_cache: Cache[tuple[Any, ...], Outcome] = Cache("schema", 16384)
settings.on_change(lambda new: _schema_cache.resize(new.schema_cache_size))


@lru_cache(4096)
def dense_stride(size: tuple[int, ...]) -> tuple[int, ...]:
    """The strides of a contiguous tensor of this size, as torch has them where a dim is empty."""
    stride, step = [], 1
    for n in reversed(size):
        stride.append(step)
        step *= max(n, 1)
    return tuple(reversed(stride))


def is_dense(size: Sequence[int], stride: Sequence[int]) -> bool:
    """Whether the elements fill memory without gaps or overlaps, in any order of dimensions."""
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
    """The outcome in the schema cache under `key`, or None."""
    return _schema_cache.get(key)


def learn(key: tuple[Any, ...], outcome: Outcome) -> Outcome:
    """Put an outcome into the schema cache, and return it."""
    _schema_cache.put(key, outcome)
    return outcome


def propagate(
    facts: OpFacts, args: tuple[Any, ...], kwargs: tuple[tuple[str, Any], ...], metas: list[Meta]
) -> Outcome:
    """The outcome by the op's meta function.

    `args` and `kwargs` name tensors as `Ref(i)` of `metas`. The op runs now where there is no
    answer: it depends on data, has no meta function, or its meta function raises. In that last case
    eager runs it or raises its own error, with its own message.
    """

    def call(stand_ins: list[torch.Tensor]) -> Any:
        plain_args = [substituted(a, stand_ins) for a in args]
        return facts.op(*plain_args, **{name: substituted(a, stand_ins) for name, a in kwargs})

    try:
        if not needs_fakes(facts, metas):
            found = outcome_of(torch_private.meta_call(metas, call), facts, metas[0][4])
        else:
            # Held until the result is read, because threads share torch's fake mode: while it
            # handles an op in another one, a fake tensor may say that it is on "meta".
            with torch_private.FAKES:
                found = outcome_of(torch_private.fake_call(metas, call), facts)
        return _masked(found, facts, args, kwargs)
    except torch_private.NoMetaFunction:
        if facts.returns_nothing and facts.writes:
            return Outcome()  # it has no outputs whose metadata would be needed
        return Outcome(runs_now="torch has no meta function for it")
    except Exception as error:
        # Whatever the reason, eager has the last word: it runs the op, or raises its own error.
        return Outcome(runs_now=f"its meta function raised {with_article(type(error).__name__)}")


def _masked(
    outcome: Outcome, facts: OpFacts, args: tuple[Any, ...], kwargs: tuple[tuple[str, Any], ...]
) -> Outcome:
    """`outcome` without the results that the call doesn't ask for, by its argument `output_mask` or
    `need_weights`.

    Kernels leave them undefined, while some meta functions give all.
    """
    given = facts.named(args, kwargs)
    mask = given.get("output_mask")
    if "need_weights" in given:  # the second result is attention's weights
        mask = (True, given["need_weights"])
    if mask is None or len(mask) != len(outcome.outs):
        return outcome
    outs = tuple(out if wanted else None for out, wanted in zip(outcome.outs, mask, strict=True))
    return replace(outcome, outs=outs)


def needs_fakes(facts: OpFacts, metas: list[Meta]) -> bool:
    """Whether fake tensors are needed: for inputs on several devices, or if the meta function is in
    Python."""
    return len({meta[4] for meta in metas}) != 1 or not has_native_meta(facts)


@cache
def has_native_meta(facts: OpFacts) -> bool:
    """Whether torch's C++ computes the op's metadata, by code that its kernels share.

    So it does for views and structured kernels. That takes 1-10 us. It can't depend on the device
    either, as some meta functions in Python do, so tensors on "meta" give the right answer.
    """
    return facts.is_view or torch_private.has_cpp_meta_kernel(facts.op)


def outcome_of(result: Any, facts: OpFacts, device: torch.device | None = None) -> Outcome:
    """The outcome that a result shows. It may be real, fake, or on "meta" in place of `device`."""
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
    """The device as real tensors have it: for "cpu:0" that is "cpu", as there is only one."""
    return CPU if device.type == "cpu" else device


CPU = torch.device("cpu")


def is_recordable(tensor: Any, *, allow_meta: bool = False) -> bool:
    """Whether traces can hold the tensor: it is strided, has memory, and isn't quantized or nested.

    `allow_meta` lets a tensor on "meta" pass, which stands for a real one.
    """
    return (
        isinstance(tensor, torch.Tensor)
        and tensor.layout is torch.strided
        and not tensor.is_quantized
        and (allow_meta or not tensor.is_meta)
        and not tensor.is_nested
        and not torch_private.is_zero_tensor(tensor)
    )


def is_marked(tensor: torch.Tensor) -> bool:
    """Whether the tensor has the conjugate or negative bit: its values aren't those in memory."""
    return tensor.is_conj() or tensor.is_neg()
