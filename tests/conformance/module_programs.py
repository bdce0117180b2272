"""Programs made of one input of a module: forward, backward and steps of SGD.

In: a `ModuleInfo`, a `ModuleInput`. Out: a `Program`; all that a step leaves behind is compared.
"""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch.utils import _pytree as pytree

from tests.conformance.op_programs import copy_of, is_differentiable
from tests.conformance.spread import seed
from tests.conformance.ways import Program

N_STEPS = 3


def inputs_of(info: Any, dtype: torch.dtype, training: bool) -> list[Any]:
    seed()
    inputs: list[Any] = info.module_inputs_func(
        info, device="cpu", dtype=dtype, requires_grad=True, training=training
    )
    return inputs


def program_of(info: Any, given: Any, dtype: torch.dtype, training: bool) -> Program:
    """A new module each run, in its last parameters after `N_STEPS` steps."""

    def prepare() -> Any:
        seed()
        made = given.constructor_input
        module = info.module_cls(*copied(made.args), **copied(made.kwargs))
        module = module.to(dtype).train(training)
        return module, copied(given.forward_input.args), copied(given.forward_input.kwargs)

    return Program(prepare, train)


def copied(tree: Any) -> Any:
    def copy_leaf(leaf: Any) -> Any:
        if isinstance(leaf, torch.Tensor):
            return copy_of(leaf, leaf.requires_grad)
        return copy.deepcopy(leaf) if isinstance(leaf, torch.nn.Module) else leaf

    return pytree.tree_map(copy_leaf, tree)


def train(arguments: Any) -> Any:
    module, args, kwargs = arguments
    seen: list[Any] = []
    optimizer = None
    for _ in range(N_STEPS):
        result = module(*args, **kwargs)
        outputs = [t for t in pytree.tree_leaves(result) if is_differentiable(t)]
        if outputs:
            torch.autograd.backward(outputs, [torch.ones_like(t) for t in outputs])
        inputs = [t for t in pytree.tree_leaves((args, kwargs)) if is_differentiable(t)]
        seen += [result, state_of(module), [t.grad for t in inputs]]
        for tensor in inputs:
            tensor.grad = None
        # made after the first step: a lazy module has no parameters before
        if optimizer is None and any(p.requires_grad for p in module.parameters()):
            optimizer = torch.optim.SGD(module.parameters(), lr=0.01, momentum=0.9)
        if optimizer is not None:
            optimizer.step()
            optimizer.zero_grad()
    return seen, state_of(module)


def state_of(module: torch.nn.Module) -> Any:
    """Copies of the parameters, their gradients, and the buffers, as they are now."""
    with torch.no_grad():
        parameters = [(p.clone(), p.grad) for p in module.parameters()]
        return parameters, [b.clone() for b in module.buffers()]
