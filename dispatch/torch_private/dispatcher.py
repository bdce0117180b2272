"""What torch's dispatcher knows of an op, and kernels that are put into it from Python."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch._C import DispatchKey
from torch._ops import OpOverload


def is_in_dispatcher(op: OpOverload) -> bool:
    """Whether C++ knows the op. It doesn't know those by which Python asks tensors for metadata."""
    return bool(torch._C._dispatch_has_kernel(op.name()))


def is_composite(op: OpOverload) -> bool:
    """Whether `op` has an implementation in terms of other ops, for devices without their own.

    On such devices autograd takes the op apart before a dispatch mode sees it. Only under
    `torch.inference_mode()` the mode sees the op itself; see `autograd_would_have_decomposed` in
    torch/utils/_python_dispatch.py.
    """
    return op.has_kernel_for_dispatch_key(DispatchKey.CompositeImplicitAutograd)


def decompose(op: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """The result of a composite op, taken apart as in eager: in C++ where torch has it in C++."""
    key = DispatchKey.CompositeImplicitAutograd
    # Views inside are to be marked as views, as they would be above dispatch: `matmul` looks
    # whether a view of a parameter requires a gradient. A view that is the op's own result is
    # marked by its caller.
    excluded = torch._C._dispatch_tls_local_exclude_set()
    if all(returned.alias_info is None for returned in op._schema.returns):
        excluded = excluded.remove(DispatchKey.ADInplaceOrView)
    with torch._C._ForceDispatchKeyGuard(torch._C._dispatch_tls_local_include_set(), excluded):
        if torch._C._dispatch_has_kernel_for_dispatch_key(op.name(), key):
            return op._op_dk(key, *args, **kwargs)
        return op.decompose(*args, **kwargs)


_ABOVE_AUTOGRAD = DispatchKey.PythonTLSSnapshot
"""A dispatch key that calls under modes, and calls with tensor subclasses, have. Its kernels run
before any that take ops apart."""


class KernelsAboveAutograd:
    """Kernels for aten ops that see a call before autograd takes it apart.

    Only calls under modes and calls with tensor subclasses come to them.
    """

    def __init__(self) -> None:
        self._library = torch.library.Library("aten", "IMPL")

    def put(self, op: OpOverload, takes: Callable[..., bool], kernel: Callable[..., Any]) -> None:
        """Have `kernel` called for `op`, if `takes(op, *arguments)` says so."""
        after = torch._C._dispatch_keyset_full_after(_ABOVE_AUTOGRAD)

        def choose(keys: Any, *args: Any, **kwargs: Any) -> Any:
            if takes(op, *args, **kwargs):
                return kernel(*args, **kwargs)
            return op.redispatch(keys & after, *args, **kwargs)

        schema = op._schema
        name = schema.name.removeprefix("aten::") + f".{schema.overload_name}".rstrip(".")
        self._library.impl(name, choose, _ABOVE_AUTOGRAD.name, with_keyset=True)

    def remove(self) -> None:
        """Take all these kernels away again."""
        self._library._destroy()


def has_own_kernel(op: OpOverload, device: torch.device) -> bool:
    """Whether `op` has a kernel for the device itself. Autograd doesn't take it apart then."""
    key = torch._C._dispatch_key_for_device(device.type)
    return torch._C._dispatch_has_kernel_for_dispatch_key(op.name(), key)


def _compiled_meta_kernels(op: OpOverload) -> list[str]:
    """The dispatcher's lines on the op's kernels for "meta" that are compiled with torch. A kernel
    that Python has replaced is among them, marked as inactive."""
    registered = torch._C._dispatch_dump(op.name()).splitlines()
    return [line for line in registered if line.startswith("Meta") and "RegisterMeta" in line]


def has_cpp_meta_kernel(op: OpOverload) -> bool:
    """Whether the op's kernel for "meta" is compiled with torch, and Python hasn't replaced it."""
    return any(line.startswith("Meta:") for line in _compiled_meta_kernels(op))


def has_meta_kernel(op: OpOverload) -> bool:
    """Whether the op can run on "meta". Then the metadata of its results depend on no values."""
    return torch._C._dispatch_has_computed_kernel_for_dispatch_key(op.name(), "Meta")


def is_structured(op: OpOverload) -> bool:
    """Whether torch has a compiled shape function for the op, even if Python has replaced it."""
    return bool(_compiled_meta_kernels(op))
