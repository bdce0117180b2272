"""Runs a graph call by call without building a plan: for traces seen once.

In: a graph, its leaves and scalars. Out: the live values. Checks on the way that each op gave the
metadata it was recorded with, which plans then rely on; notes the ops that did not.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch._ops import OpOverload

from lazy_tensor.dispatch.plan.graph import Graph
from lazy_tensor.dispatch.trie.trace import Node
from lazy_tensor.kernels.backends.aten import real
from lazy_tensor.kernels.segment import TensorSpec


def interpret(
    graph: Graph, leaves: list[torch.Tensor], scalars: list[complex]
) -> tuple[torch.Tensor, ...]:
    """The values of `graph.live`. After an exception `failure` reads this function's variables."""
    values: dict[int, Any] = {
        leaf.slot: data for leaf, data in zip(graph.leaves, leaves, strict=True)
    }
    leaves.clear()
    done: Node | None = None
    for node, dead in zip(graph.nodes, _dying(graph), strict=True):
        done = run_node(node, values, scalars, graph.spec)  # noqa: F841  `failure` looks at it
        for slot in dead:
            del values[slot]
    return tuple(values[slot] for slot in graph.live)


def run_node(
    node: Node, values: dict[int, Any], scalars: list[complex], promised: Mapping[int, TensorSpec]
) -> Node:
    """Run one call on `values`, by slot, and add what it gives; `promised` is what was recorded.

    Gives the node back. After an exception `failure` looks whether `results` were there.
    """
    args = [real(a, values, scalars) for a in node.args]
    kwargs = {name: real(a, values, scalars) for name, a in node.kwargs}
    results = node.facts.op._op(*args, **kwargs)
    made = (results,) if node.is_single else results
    for i, slot in enumerate(node.outs):
        if slot is not None:
            tensor, spec = made[i], promised[slot]
            if not is_of(tensor, spec) and all(is_of(values[r], promised[r]) for r in node.reads):
                MISJUDGED.add(node.facts.op)  # and not one whose result it was given
            values[slot] = laid_out(tensor, node, spec)
    return node


def is_of(tensor: torch.Tensor, spec: TensorSpec) -> bool:
    """Whether the tensor has the shape and dtype that were recorded."""
    return tensor.shape == spec.size and tensor.dtype == spec.dtype


def laid_out(tensor: torch.Tensor, node: Node, spec: TensorSpec) -> torch.Tensor:
    """What `node` gave as its wrapper says: some kernels choose other strides than their meta."""
    if is_of(tensor, spec) and node.view_of is None and not _is_laid_out(tensor, spec.stride):
        OWN_STRIDES.add(node.facts.op)
        return restrided(tensor, spec.stride)
    return tensor


MISJUDGED: set[OpOverload] = set()
"""Ops seen to give another shape or dtype than their meta function says; `flush` sees to them."""
OWN_STRIDES: set[OpOverload] = set()
"""Ops seen to lay out their result otherwise than their meta function says; plans restride them."""


def _is_laid_out(tensor: torch.Tensor, stride: tuple[int, ...]) -> bool:
    """Whether the tensor has this stride, where a dim has more than one element."""
    given = tensor.stride()
    return given == stride or all(
        n <= 1 or a == b for n, a, b in zip(tensor.shape, given, stride, strict=True)
    )


def restrided(tensor: torch.Tensor, stride: tuple[int, ...]) -> torch.Tensor:
    """`tensor` with this stride: itself, or a copy."""
    if _is_laid_out(tensor, stride):
        return tensor
    return torch.empty_strided(
        tensor.shape, stride, dtype=tensor.dtype, device=tensor.device
    ).copy_(tensor)


def _dying(graph: Graph) -> list[list[int]]:
    """For each node the slots that nothing names after it."""
    alive = set(graph.live)
    dying: list[list[int]] = []
    for node in reversed(graph.nodes):
        named = [*node.reads, *(slot for slot in node.outs if slot is not None)]
        dead = [slot for slot in dict.fromkeys(named) if slot not in alive]
        alive.update(dead)
        dying.append(dead)
    dying.reverse()
    return dying
