"""torch's compilers and tracers, which may run in a program that is recorded."""

from __future__ import annotations

import functools
import importlib
from collections.abc import Sequence
from typing import Any

import torch
from torch.utils import _pytree as pytree
from wrapt import register_post_import_hook


@functools.cache
def import_for_subclasses() -> None:
    """Import now what torch imports with the first op on a tensor subclass (0.4 s)."""
    if torch.distributed.is_available():
        importlib.import_module("torch.distributed.tensor")


def is_flat_list(structure: Any) -> bool:
    """Whether a pytree structure is a list of leaves."""
    return bool(structure == pytree.tree_structure([0] * structure.num_leaves))


def is_traced() -> bool:
    """Whether `torch.jit.trace` is tracing."""
    return bool(torch.jit.is_tracing())  # type: ignore[attr-defined,no-untyped-call]


_scripted: list[Any] = []


def script_as(made: Any, own: Any) -> None:
    """Let TorchScript take `made` for `own`, in whose place a patch puts it.

    TorchScript knows its builtins by their `id()`. It can't compile the Python of `made`.
    """
    name = torch.jit._builtins._find_builtin(own)
    if name is not None:
        torch.jit._builtins._register_builtin(made, name)
        _scripted.append(made)  # kept for good: no other object may get its id


def hide_from_dynamo(packages: Sequence[str]) -> None:
    """Keep `torch.compile` from tracing these packages' functions when it runs inside the mode."""

    # once Dynamo is imported, and not before: to import it takes more than a second
    def hide(trace_rules: Any) -> None:
        for package in packages:
            trace_rules.add(package)

    register_post_import_hook(hide, "torch._dynamo.trace_rules")
