"""The tensors that a program is given, by kind: what is pending on them, and where.

In the mode a kind is `pending` (a lazy tensor), `written` (a plain tensor with a pending write),
`view` (a view taken before that write) or `mixed` (the first plain, the others written); in no mode
`wrapped` (a lazy tensor), `wrapped_mixed` or `parameter` (wrapped, with a pending write). Eagerly
all of them have the same values.
"""

from __future__ import annotations

from contextlib import nullcontext
from functools import cache
from typing import Any

import torch

from lazy_tensor import lazy_mode, wrap

IN_MODE = ("pending", "written", "view", "mixed")
WRAPPED = ("wrapped", "wrapped_mixed", "parameter")
KINDS = (*IN_MODE, *WRAPPED)
DTYPES = ("float", "int")
STORAGES = ("s", "t")
"""The operands that are storages, untyped and typed, of `x`."""


@cache
def values(dtype: str) -> dict[str, torch.Tensor]:
    """What each operand is to hold when the callable is called."""
    generator = torch.Generator().manual_seed(7)

    def rand(*shape: int) -> torch.Tensor:
        if dtype == "int":
            return torch.randint(0, 3, shape, generator=generator)
        return torch.rand(shape, generator=generator) * 0.5 + 0.25

    x, y, v, g = rand(3, 3), rand(3, 3), rand(3), rand(2, 3, 4, 4)
    if dtype == "float":
        x = x @ x.T + torch.eye(3)
        x = x / x.max()
    return {
        "x": x, "y": y, "v": v, "g": g,
        "c": torch.complex(torch.rand(3, 3, generator=generator), torch.eye(3) + 1),
        "i": torch.tensor([0, 2, 1]), "n": torch.tensor(2),
        "b": torch.tensor([[True, False, True], [False, True, False], [False, False, True]]),
    }  # fmt: skip


def _before(final: torch.Tensor) -> torch.Tensor:
    if final.dtype is torch.bool:
        return ~final
    return final * 2 if final.is_floating_point() or final.is_complex() else final - 1


def _changed(tensor: torch.Tensor) -> torch.Tensor:
    if tensor.dtype is torch.bool:
        return ~tensor
    return tensor * 0.5 if tensor.is_floating_point() or tensor.is_complex() else tensor + 1


def _write(tensor: torch.Tensor) -> torch.Tensor:
    with torch.no_grad():
        if tensor.dtype is torch.bool:
            return tensor.logical_not_()
        if tensor.is_floating_point() or tensor.is_complex():
            return tensor.mul_(0.5)
        return tensor.add_(1)


def way(kind: str, *, lazily: bool) -> Any:
    """What a program of this kind runs in."""
    return lazy_mode() if lazily and kind in IN_MODE else nullcontext()


class Operands:
    """The operands of some names; `pend` makes them what their kind says, within `way`."""

    def __init__(self, kind: str, dtype: str, names: list[str], *, lazily: bool) -> None:
        self.kind = kind
        self.tensors: dict[str, Any] = {}
        self.storages = dict.fromkeys(name for name in names if name in STORAGES)
        needed = [name for name in names if name not in STORAGES]
        if self.storages and "x" not in needed:
            needed.append("x")
        self.plain = needed[0] if kind in ("mixed", "wrapped_mixed") else None
        for name in needed:
            self.tensors[name] = self._made(values(dtype)[name], name, lazily)

    def _made(self, final: torch.Tensor, name: str, lazily: bool) -> torch.Tensor:
        if name == self.plain:
            return final.clone()
        made = _before(final)
        if self.kind == "parameter":
            holder = torch.nn.Module()
            if made.is_floating_point():
                holder.p = torch.nn.Parameter(made)
            else:
                holder.register_buffer("p", made)
            held: Any = wrap(holder) if lazily else holder
            parameter: torch.Tensor = held.p
            return parameter
        if self.kind in WRAPPED:
            return wrap(made) if lazily else made
        return torch.stack([made, made])[1] if self.kind == "view" else made

    def pend(self) -> dict[str, Any]:
        """All by name, with what is pending."""
        if self.kind in ("pending", "wrapped", "wrapped_mixed"):
            for name, tensor in self.tensors.items():
                if name != self.plain:
                    self.tensors[name] = _changed(tensor)
            self._take_storages()
        else:
            self._take_storages()
            for name, tensor in self.tensors.items():
                if name != self.plain:
                    _write(tensor if tensor._base is None else tensor._base)
        return {**self.tensors, **self.storages}

    def _take_storages(self) -> None:
        for name in self.storages:
            x = self.tensors["x"]
            self.storages[name] = x.untyped_storage() if name == "s" else x.storage()
