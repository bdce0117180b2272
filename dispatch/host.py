"""The tensor class that `lazy_tensor` puts on top, as far as `dispatch` must know it.

`lazy_tensor.tensor` installs it; dispatch makes its tensors and reads their `_value`, nothing else.
"""

from __future__ import annotations

from typing import Any

import torch

from lazy_tensor.dispatch.torch_private import mark, new_wrapper
from lazy_tensor.dispatch.trace import Value


class ValueTensor(torch.Tensor):
    """What dispatch knows of a lazy tensor: it owns a value."""

    _value: Value


tensor_class: type[ValueTensor] = ValueTensor


def value_in(tensor: torch.Tensor) -> Value:
    """The value of a tensor of the installed class."""
    assert isinstance(tensor, ValueTensor)
    return tensor._value


def install(cls: type[ValueTensor]) -> None:
    global tensor_class
    tensor_class = cls


def new_tensor(value: Value, meta: tuple[Any, ...]) -> torch.Tensor:
    """A tensor of the installed class on `value`; `meta` as `make_wrapper` takes it."""
    out: ValueTensor = new_wrapper(tensor_class, meta)
    out._value = value
    return out


def concrete(data: torch.Tensor) -> torch.Tensor:
    """A tensor of the installed class whose value is computed."""
    value = Value()
    value.data = data
    meta = (data.shape, data.stride(), data.storage_offset(), None, data.dtype, data.layout,
            data.device)  # fmt: skip
    return mark(new_tensor(value, meta), data.is_conj(), data.is_neg())
