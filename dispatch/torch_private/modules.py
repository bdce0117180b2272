"""Modules: calling something else in their place, and keeping what they hold as it is."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch.nn.utils import parametrize
from torch.nn.utils.prune import BasePruningMethod
from torch.nn.utils.weight_norm import WeightNorm
from torch.optim import optimizer

from lazy_tensor.dispatch.torch_private.tensors import versions_kept


def detach_computed_weights(module: torch.nn.Module) -> None:
    """Take the graphs off weights that `weight_norm` and `prune` compute anew before each forward
    pass: they hold the parameters that these are computed from."""
    for part in module.modules():
        for hook in part._forward_pre_hooks.values():
            name: str | None = None
            if isinstance(hook, WeightNorm):
                name = hook.name
            elif isinstance(hook, BasePruningMethod):
                name = hook._tensor_name
            if name is not None:
                setattr(part, name, getattr(part, name).detach())


@contextmanager
def attributes_kept(module: torch.nn.Module) -> Iterator[None]:
    """Context manager: at the end the attributes and buffers of all parts of the module are as they
    were. So are the data of the tensors among them, and the states of generators. Parameters are
    left as they are."""
    held: list[tuple[dict[str, Any], dict[str, Any]]] = []
    for part in module.modules():
        held += [(one, dict(one)) for one in (vars(part), part._buffers)]
    values = {id(one): one for _, kept in held for one in kept.values()}.values()
    tensors = [one for one in values if isinstance(one, torch.Tensor) and not one.is_inference()]
    copies = [one.detach().clone() for one in tensors]
    drawn = [(one, one.get_state()) for one in values if isinstance(one, torch.Generator)]
    with versions_kept(tensors):
        try:
            yield
        finally:
            for one, kept in held:
                one.clear()
                one.update(kept)
            with torch.no_grad():
                for tensor, copy in zip(tensors, copies, strict=True):
                    tensor.copy_(copy)
            for generator, state in drawn:
                generator.set_state(state)


def call_module(module: torch.nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Call the module itself with its hooks, whatever `call_by` put in its place."""
    return module._call_impl(*args, **kwargs)


def call_by(module: torch.nn.Module, call: Callable[..., Any] | None) -> None:
    """Have `call` run in place of the module when that is called; None for the module itself."""
    _leave_replicas_alone()
    # where `Module.compile` puts what it made: neither copies nor pickles of the module have it
    module._compiled_call_impl = call


@functools.cache
def _leave_replicas_alone() -> None:
    """Have replicas of a replayed module run by themselves: `DataParallel` makes them, with other
    parameters."""
    own: Any = torch.nn.Module._replicate_for_data_parallel

    def replicate(self: torch.nn.Module) -> Any:
        replica: Any = own(self)
        if getattr(called_by(replica), "is_replay", False):
            replica._compiled_call_impl = None
        return replica

    torch.nn.Module._replicate_for_data_parallel = replicate  # type: ignore[method-assign]


def called_by(module: torch.nn.Module) -> Any:
    """What `call_by`, or `Module.compile`, has put in the module's place."""
    return module._compiled_call_impl


def hooks_of_all_modules() -> list[tuple[str, Any]]:
    """The dicts of global hooks, which every module or optimizer runs, with their names."""
    found: list[tuple[str, Any]] = []
    for owner in (torch.nn.modules.module, optimizer):
        for name, value in vars(owner).items():
            if name.startswith("_global_") and isinstance(value, dict):
                found.append((f"{owner.__name__}.{name}", value))
    return found


@contextmanager
def without_weak_references(module: torch.nn.Module) -> Iterator[None]:
    """Context manager: RNNs hold no weak references to their weights until its end.
    `torch.utils.swap_tensors` refuses a tensor that has any."""
    rnns: list[Any] = [m for m in module.modules() if isinstance(m, torch.nn.RNNBase)]
    for rnn in rnns:
        rnn._flat_weight_refs = []
    try:
        yield
    finally:
        for rnn in rnns:
            rnn._init_flat_weights()


def is_parametrization_cached() -> int:
    """How many `torch.nn.utils.parametrize.cached()` are active."""
    return parametrize._cache_enabled
