"""The peers that benchmarks run beside this package, and notes on those that aren't installed.

In: a function or module. Out: the same, compiled by `torch.compile` or lightning-thunder.
"""

from __future__ import annotations

import importlib
import importlib.metadata
import importlib.util
import warnings
from collections.abc import Callable
from functools import cache
from typing import Any

import torch

PEERS = ("compile", "thunder")
"""`torch.compile` (Inductor) and `thunder.jit`, by their names in tables."""
DISTRIBUTIONS = {"jax": "jax", "thunder": "lightning-thunder"}
"""The package that pip installs for a peer."""

GONE_FROM_TORCH = ("align_as", "align_to", "has_names", "refine_names", "rename")
"""Methods that thunder 0.2.6 looks up on `Tensor` when it is imported, and torch 2.13 lacks."""


@cache
def missing(peer: str) -> str | None:
    """Why `peer` can't be measured here; None if it can."""
    if peer == "jax":
        is_there = importlib.util.find_spec("jax") is not None
        return None if is_there else "JAX is not installed: pip install jax"
    if peer != "thunder":
        return None
    try:
        thunder()
    except ImportError:
        return "lightning-thunder is not installed: pip install lightning-thunder"
    # thunder uses torch's internals, so its import may raise anything on another torch
    except Exception as error:
        version = importlib.metadata.version("lightning-thunder")
        return f"lightning-thunder {version} fails on torch {torch.__version__}: {error!r}"
    return None


def present(sides: tuple[str, ...]) -> tuple[str, ...]:
    """Those of `sides` that can be measured here."""
    return tuple(side for side in sides if missing(side) is None)


def notes(sides: tuple[str, ...]) -> list[str]:
    """Notes for a page on the peers among `sides`: versions, and what is missing."""
    found = []
    for side in sides:
        why = missing(side)
        if why is not None:
            found.append(f"not measured: {why}")
        elif side in DISTRIBUTIONS:
            name = DISTRIBUTIONS[side]
            found.append(f"{name} {importlib.metadata.version(name)}")
    return found


@cache
def thunder() -> Any:
    """The module `thunder`, imported; methods that torch lacks raise an error when called."""
    for name in GONE_FROM_TORCH:
        if not hasattr(torch.Tensor, name):
            setattr(torch.Tensor, name, _gone(name))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return importlib.import_module("thunder")


def _gone(name: str) -> Callable[..., Any]:
    def method(self: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        raise NotImplementedError(f"torch {torch.__version__} has no Tensor.{name}")

    method.__name__ = method.__qualname__ = name
    return method


def compiled(peer: str, function: Any) -> Any:
    """`function`, or a module, as compiled by `peer`. The peer's own warnings are not shown."""
    jitted = torch.compile(function) if peer == "compile" else thunder().jit(function)

    def call(*args: Any) -> Any:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            return jitted(*args)

    return call
