"""The tensor classes of the layers above, as far as `dispatch` must know them.

`dispatch` may import neither `lazy_tensor` nor `sharding`. So `LazyTensor` and `DTensor` derive
from classes here, and are installed when they are imported. `dispatch` makes such tensors and reads
their `_value` and `_layout`, nothing else. In: a value and metadata. Out: tensors for the program.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from lazy_tensor.dispatch import torch_private
from lazy_tensor.dispatch.torch_private import mark, new_wrapper
from lazy_tensor.dispatch.trie.trace import Value

OWN_ATTRIBUTES = ("_value", "_layout", "_is_param")
"""Attributes of a lazy tensor that make it one, or a parameter. All others are the program's."""


class ValueTensor(torch.Tensor):
    """A lazy tensor, as `dispatch` knows it: it owns a value."""

    _value: Value


tensor_class: type[ValueTensor] = ValueTensor
"""The class that `lazy_tensor` has installed: `LazyTensor`."""


class ShardedTensor(ValueTensor):
    """A sharded tensor, as `dispatch` knows it: its value is this rank's part, its metadata are
    those of the whole tensor.

    `_layout` says how the two belong together. It stands in keys: it is hashable, and equal only to
    itself.
    """

    _layout: Layout


class Layout:
    """How a sharded tensor lies on its mesh, as far as `dispatch` must know.

    `number` stands for the layout in the keys of C++: no other layout gets it while the process
    lives. `meta` are `make_wrapper`'s arguments for the sharded tensor, `local` those for the
    tensor of this rank's part.
    """

    __slots__ = ("__weakref__", "local", "meta", "number")

    def __init__(self, number: int, meta: tuple[Any, ...], local: tuple[Any, ...]) -> None:
        self.number = number
        self.meta = meta
        self.local = local


sharded_class: type[ShardedTensor] = ShardedTensor
"""The class that `sharding` has installed: its `DTensor`."""
call_sharded: Callable[..., Any] | None = None
"""Runs a call with sharded tensors that no state knows: records the local ops and collectives."""
who_is_missing: Callable[[], str] | None = None
"""Says which ranks did not fail with this one, for the error of a collective that failed."""


cpp: Any = None
"""The C++ that makes lazy tensors, once ops come there. It reads the values of such tensors without
Python's look-up of attributes, and ops may pass such tensors by (see `native/below.h`)."""


def layout_of(tensor: torch.Tensor) -> Layout | None:
    """How a sharded tensor lies on its mesh; None for any other."""
    return tensor._layout if type(tensor) is sharded_class else None


def value_in(tensor: torch.Tensor) -> Value:
    """The value of a tensor of an installed class."""
    assert isinstance(tensor, ValueTensor)
    return tensor._value


def install(cls: type[ValueTensor]) -> None:
    """Make lazy tensors of this class from now on."""
    global tensor_class
    tensor_class = cls


def install_sharded(
    cls: type[ShardedTensor], call: Callable[..., Any], missing: Callable[[], str]
) -> None:
    """Make sharded tensors of this class from now on, and hand their calls to these functions."""
    global sharded_class, call_sharded, who_is_missing
    sharded_class, call_sharded, who_is_missing = cls, call, missing


def new_tensor(
    value: Value, meta: tuple[Any, ...], like: torch.Tensor | None = None
) -> torch.Tensor:
    """A tensor of the installed class on `value`; `meta` and `like` as `new_wrapper` takes them."""
    if cpp is not None:
        made: torch.Tensor = cpp.lazy_on(value, meta, like)
        return made
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
    """This rank's part of a sharded tensor: a lazy tensor on the same value."""
    value = tensor._value
    if value.data is not None:
        return concrete_on(value, value.data)
    return new_tensor(value, tensor._layout.local, tensor)


def local_like(tensor: torch.Tensor, like: torch.Tensor | None = None) -> torch.Tensor:
    """Another tensor of the installed class on the same value. It is an inference tensor if `like`
    is one, or, without `like`, if `tensor` is."""
    return new_tensor(value_in(tensor), _arguments(tensor), tensor if like is None else like)


def become(tensor: torch.Tensor, twin: torch.Tensor) -> None:
    """Give a lazy tensor another one's size, strides and dtype. It stays the same object, and an
    inference tensor if it was one."""
    if tensor.is_inference() is not twin.is_inference():
        layout = layout_of(twin)
        if layout is None:
            twin = local_like(twin, tensor)
        else:
            twin = new_sharded(value_in(twin), layout, tensor)
    torch_private.become(tensor, twin)


def concrete(data: torch.Tensor) -> torch.Tensor:
    """A tensor of the installed class on a new value, whose data is `data`."""
    if cpp is not None:
        made: torch.Tensor = cpp.concrete(data)
        return made
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
