"""torch's compilers and tracers, beside which programs are recorded."""

from __future__ import annotations

import functools
import importlib
from collections.abc import Sequence
from typing import Any

import torch
from wrapt import register_post_import_hook


@functools.cache
def import_for_subclasses() -> None:
    """Import now what torch imports with the first op on a tensor subclass (0.4 s)."""
    if torch.distributed.is_available():
        importlib.import_module("torch.distributed.tensor")


def is_flat_list(structure: Any) -> bool:
    """Whether a structure of pytree's is a list of leaves."""
    return structure.type is list and structure.num_leaves == structure.num_children


def is_traced() -> bool:
    """Whether `torch.jit.trace` takes a program apart."""
    return bool(torch.jit.is_tracing())  # type: ignore[attr-defined,no-untyped-call]


_scripted: list[Any] = []


def script_as(made: Any, own: Any) -> None:
    """Let TorchScript take `made` for `own`, if that is one of the builtins, which it knows by
    their ids and can't read otherwise."""
    name = torch.jit._builtins._find_builtin(own)
    if name is not None:
        torch.jit._builtins._register_builtin(made, name)
        _scripted.append(made)  # another object would get its id


def hide_from_dynamo(packages: Sequence[str]) -> None:
    """Keep `torch.compile` from tracing these packages' frames when it runs inside the mode."""

    def hide(trace_rules: Any) -> None:
        for package in packages:
            trace_rules.add(package)

    register_post_import_hook(hide, "torch._dynamo.trace_rules")
