"""The tensor class that `lazy_tensor` puts on top, as far as `dispatch` must know it.

`lazy_tensor.tensor` installs it; dispatch makes its tensors and reads their `_value`, nothing else.
"""

from __future__ import annotations

from typing import Any

import torch

from lazy_tensor.dispatch.torch_private import make_wrapper
from lazy_tensor.dispatch.trace import Value

tensor_class: type[torch.Tensor] = torch.Tensor


def install(cls: type[torch.Tensor]) -> None:
    global tensor_class
    tensor_class = cls


def new_tensor(value: Value, meta: tuple[Any, ...]) -> torch.Tensor:
    """A tensor of the installed class on `value`; `meta` as `make_wrapper` takes it."""
    out = make_wrapper(tensor_class, *meta)
    out._value = value  # type: ignore[attr-defined]
    return out


def concrete(data: torch.Tensor) -> torch.Tensor:
    """A tensor of the installed class whose value is computed."""
    value = Value()
    value.data = data
    meta = (data.shape, data.stride(), data.storage_offset(), None, data.dtype, data.layout,
            data.device)  # fmt: skip
    return new_tensor(value, meta)
