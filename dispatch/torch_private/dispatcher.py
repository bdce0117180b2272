"""What torch's dispatcher knows of an op, and kernels of ours in it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch._C import DispatchKey
from torch._ops import OpOverload


def is_in_dispatcher(op: OpOverload) -> bool:
    """Whether C++ knows the op: not those by which Python asks tensors for their metadata."""
    return bool(torch._C._dispatch_has_kernel(op.name()))


def is_composite(op: OpOverload) -> bool:
    """Whether `op` has an implementation in terms of other ops, for devices without their own.

    On those it reaches a dispatch mode only under `torch.inference_mode()`; see
    `autograd_would_have_decomposed` in torch/utils/_python_dispatch.py.
    """
    return op.has_kernel_for_dispatch_key(DispatchKey.CompositeImplicitAutograd)


def decompose(op: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """What a composite op gives, taken apart as in eager: in C++ where it is written so.

    Its views are marked as views, as they would be above dispatch: `matmul` looks whether one of a
    parameter requires a gradient. A view that is handed back is marked by its caller.
    """
    key = DispatchKey.CompositeImplicitAutograd
    excluded = torch._C._dispatch_tls_local_exclude_set()
    if all(returned.alias_info is None for returned in op._schema.returns):
        excluded = excluded.remove(DispatchKey.ADInplaceOrView)
    with torch._C._ForceDispatchKeyGuard(torch._C._dispatch_tls_local_include_set(), excluded):
        if torch._C._dispatch_has_kernel_for_dispatch_key(op.name(), key):
            return op._op_dk(key, *args, **kwargs)
        return op.decompose(*args, **kwargs)


_ABOVE_AUTOGRAD = DispatchKey.PythonTLSSnapshot
"""A key that modes and tensor subclasses have, and that comes before all that takes ops apart."""


class KernelsAboveAutograd:
    """Kernels under modes and of tensor subclasses, before all that takes aten's ops apart."""

    def __init__(self) -> None:
        self._library = torch.library.Library("aten", "IMPL")

    def put(self, op: OpOverload, takes: Callable[..., bool], kernel: Callable[..., Any]) -> None:
        """Have `kernel` called for `op` where it `takes` the op and the arguments. Calls of plain
        tensors outside modes are as ever."""
        after = torch._C._dispatch_keyset_full_after(_ABOVE_AUTOGRAD)

        def choose(keys: Any, *args: Any, **kwargs: Any) -> Any:
            if takes(op, *args, **kwargs):
                return kernel(*args, **kwargs)
            return op.redispatch(keys & after, *args, **kwargs)

        schema = op._schema
        name = schema.name.removeprefix("aten::") + f".{schema.overload_name}".rstrip(".")
        self._library.impl(name, choose, _ABOVE_AUTOGRAD.name, with_keyset=True)

    def remove(self) -> None:
        """Leave these ops to torch again."""
        self._library._destroy()


def has_own_kernel(op: OpOverload, device: torch.device) -> bool:
    """Whether `op` has a kernel for the device itself, which autograd then doesn't take apart."""
    key = torch._C._dispatch_key_for_device(device.type)
    return torch._C._dispatch_has_kernel_for_dispatch_key(op.name(), key)


def _compiled_meta_kernels(op: OpOverload) -> list[str]:
    """What the dispatcher says of the op's kernels for "meta" that are compiled with torch."""
    registered = torch._C._dispatch_dump(op.name()).splitlines()
    return [line for line in registered if line.startswith("Meta") and "RegisterMeta" in line]


def has_cpp_meta_kernel(op: OpOverload) -> bool:
    """Whether the op's kernel for "meta" is compiled with torch, and not replaced in Python."""
    return any(line.startswith("Meta:") for line in _compiled_meta_kernels(op))


def has_meta_kernel(op: OpOverload) -> bool:
    """Whether the op can run on "meta": so what it gives depends on no values."""
    return torch._C._dispatch_has_computed_kernel_for_dispatch_key(op.name(), "Meta")


def is_structured(op: OpOverload) -> bool:
    """Whether torch has a compiled shape function for the op, replaced in Python or not."""
    return bool(_compiled_meta_kernels(op))
