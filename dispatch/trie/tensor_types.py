"""The tensor class that `lazy_tensor` puts on top, as far as `dispatch` must know it.

`lazy_tensor.tensor` installs it; dispatch makes its tensors and reads their `_value`, nothing else.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from lazy_tensor.dispatch import torch_private
from lazy_tensor.dispatch.torch_private import mark, new_wrapper
from lazy_tensor.dispatch.trie.trace import Value


class ValueTensor(torch.Tensor):
    """What dispatch knows of a lazy tensor: it owns a value."""

    _value: Value


tensor_class: type[ValueTensor] = ValueTensor


class ShardedTensor(ValueTensor):
    """What dispatch knows of a sharded tensor: its value is the local one, its metadata are global.

    `_layout` says how the two belong together. It is hashable, and equal only to itself.
    """

    _layout: Layout


class Layout:
    """How a sharded tensor lies on its mesh, as far as `dispatch` must know.

    `number` is the layout's for as long as the process lives; `meta` are `make_wrapper`'s arguments
    for the sharded tensor, `local` those for its local one.
    """

    __slots__ = ("__weakref__", "local", "meta", "number")

    def __init__(self, number: int, meta: tuple[Any, ...], local: tuple[Any, ...]) -> None:
        self.number = number
        self.meta = meta
        self.local = local


sharded_class: type[ShardedTensor] = ShardedTensor
"""The class whose calls go to `call_sharded` when no state knows them."""
call_sharded: Callable[..., Any] | None = None
call_at_once: Callable[..., Any] | None = None
"""What its calls are offered to first while nothing is recorded."""
who_is_missing: Callable[[], str] | None = None
"""What is said when a collective fails: which ranks did not fail with this one."""


def layout_of(tensor: torch.Tensor) -> Layout | None:
    """How a sharded tensor lies on its mesh; None for any other."""
    return tensor._layout if type(tensor) is sharded_class else None


def value_in(tensor: torch.Tensor) -> Value:
    """The value of a tensor of the installed class."""
    assert isinstance(tensor, ValueTensor)
    return tensor._value


def install(cls: type[ValueTensor]) -> None:
    global tensor_class
    tensor_class = cls


def install_sharded(
    cls: type[ShardedTensor],
    call: Callable[..., Any],
    at_once: Callable[..., Any],
    missing: Callable[[], str],
) -> None:
    global sharded_class, call_sharded, call_at_once, who_is_missing
    sharded_class, call_sharded, call_at_once, who_is_missing = cls, call, at_once, missing


def new_tensor(
    value: Value, meta: tuple[Any, ...], like: torch.Tensor | None = None
) -> torch.Tensor:
    """A tensor of the installed class on `value`; `meta` and `like` as `new_wrapper` takes them."""
    out: ValueTensor = new_wrapper(tensor_class, meta, like)
    out._value = value
    return out


def new_sharded(value: Value, layout: Layout, like: torch.Tensor | None = None) -> ShardedTensor:
    """A tensor of the installed sharded class on a local value; `like` as for `new_wrapper`."""
    out: ShardedTensor = new_wrapper(sharded_class, layout.meta, like)
    out._value = value
    out._layout = layout
    return out


def local_of(tensor: ShardedTensor) -> torch.Tensor:
    """The local tensor of a sharded one, lazy, on the same value."""
    value = tensor._value
    if value.data is not None:
        return concrete_on(value, value.data)
    return new_tensor(value, tensor._layout.local, tensor)


def local_like(tensor: torch.Tensor, like: torch.Tensor | None = None) -> torch.Tensor:
    """Another tensor of the installed class on the same value; of inference mode as `like`, or as
    itself."""
    return new_tensor(value_in(tensor), _arguments(tensor), tensor if like is None else like)


def become(tensor: torch.Tensor, twin: torch.Tensor) -> None:
    """Give a lazy tensor another one's size, strides and dtype; it stays the same object, and of
    inference mode if it was."""
    if tensor.is_inference() is not twin.is_inference():
        layout = layout_of(twin)
        if layout is None:
            twin = local_like(twin, tensor)
        else:
            twin = new_sharded(value_in(twin), layout, tensor)
    torch_private.become(tensor, twin)


def concrete(data: torch.Tensor) -> torch.Tensor:
    """A tensor of the installed class whose value is computed."""
    value = Value()
    value.data = data
    return concrete_on(value, data)


def concrete_on(value: Value, data: torch.Tensor) -> torch.Tensor:
    """Another tensor of the installed class on a computed value."""
    return mark(new_tensor(value, _arguments(data), data), data.is_conj(), data.is_neg())


def _arguments(tensor: torch.Tensor) -> tuple[Any, ...]:
    """`make_wrapper`'s arguments for a tensor of the same metadata."""
    return (tensor.shape, tensor.stride(), tensor.storage_offset(), None, tensor.dtype,
            tensor.layout, tensor.device)  # fmt: skip
