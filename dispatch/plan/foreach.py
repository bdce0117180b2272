"""Takes foreach ops apart, so that several ops on one tensor can be fused.

In: a graph. Out: the graph with one call for each tensor in place of each foreach call that the
tables know. On the CPU torch computes foreach ops by these very calls. Called for plans with
kernels.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import torch
from torch._ops import OpOverload

from lazy_tensor.dispatch.ops.schema import facts_of
from lazy_tensor.dispatch.plan.graph import Graph, with_nodes
from lazy_tensor.dispatch.trie.trace import Node

aten = torch.ops.aten


def _names(text: str) -> frozenset[str]:
    return frozenset(text.split())


UNARY = _names(
    """abs acos asin atan ceil clone cos cosh erf erfc exp expm1 floor frac lgamma log log10 log1p
    log2 max neg reciprocal round rsqrt sigmoid sign sin sinh sqrt tan tanh trunc zero"""
)
"""Ops of one tensor, by the names of their overloads `default`."""
DEFAULT = _names("addcdiv addcmul copy")
"""Ops of several tensors that have an overload `default`."""
BINARY = {
    "add": ("Tensor", "Tensor"), "sub": ("Tensor", "Tensor"), "mul": ("Tensor", "Tensor"),
    "div": ("Tensor", "Tensor"), "clamp_min": ("default", "Tensor"),
    "clamp_max": ("default", "Tensor"), "pow": ("Tensor_Scalar", "Tensor_Tensor"),
    "pow_": ("Scalar", "Tensor"), "lerp": ("Scalar", "Tensor"),
}  # fmt: skip
"""The overloads of an op for a number and for a tensor as the second operand."""
SAME_AS = {"maximum": "clamp_min", "minimum": "clamp_max"}
"""Foreach ops that torch computes by an op of another name."""
NORM = aten.linalg_vector_norm.default


def expand_foreach(graph: Graph) -> Graph:
    """The graph with foreach calls on CPU tensors replaced by calls on each tensor; `graph`
    itself if nothing changes."""
    nodes = [
        part
        for node in graph.nodes
        for part in (parts_of(node) if _is_worth_taking_apart(graph, node) else [node])
    ]
    return graph if nodes == graph.nodes else with_nodes(graph, nodes)


@cache
def op_of_each(op: OpOverload) -> OpOverload | None:
    """The op that the foreach op `op` does to each tensor; None if the tables don't know it."""
    namespace, _, name = op._schema.name.partition("::_foreach_")
    if namespace != "aten" or not name or op._overloadname.endswith("out"):
        return None
    # Left out: `out=` forms; `addcdiv.Tensor` and its like, whose numbers lie in a tensor; and
    # `pow.ScalarAndTensor`, whose list of tensors comes second.
    base, ending = (name[:-1], "_") if name.endswith("_") else (name, "")
    base = SAME_AS.get(base, base)
    overload = None
    if base in UNARY or (base in DEFAULT and op._overloadname != "Tensor"):
        overload = "default"
    elif base == "norm":
        return NORM
    elif base in BINARY and op._overloadname != "ScalarAndTensor":
        for_number, for_tensor = BINARY.get(base + ending) or BINARY[base]
        overload = for_number if op._overloadname.startswith("Scalar") else for_tensor
    if overload is None:
        return None
    found: OpOverload = getattr(getattr(aten, base + ending), overload)
    return found


def _is_worth_taking_apart(graph: Graph, node: Node) -> bool:
    """Whether it is a foreach call that the tables know, on the CPU, and not on 0-dim tensors only.

    Those are step counts, as a rule: one instruction of the plan serves them all.
    """
    if op_of_each(node.facts.op) is None:
        return False
    specs = [graph.spec[slot] for slot in node.reads]
    return all(spec.device.type == "cpu" for spec in specs) and any(spec.size for spec in specs)


def parts_of(node: Node) -> list[Node]:
    """The calls that a foreach call makes, one for each tensor; any other call itself."""
    op = op_of_each(node.facts.op)
    return [node] if op is None else [_part(node, op, i) for i in range(len(node.args[0]))]


def _part(node: Node, op: OpOverload, i: int) -> Node:
    """The call of `op` that a foreach call makes on its `i`-th tensor."""
    # lists of tensors and of numbers are tuples alike: each gives its `i`-th item
    args: list[Any] = [a[i] if type(a) is tuple else a for a in node.args]
    kwargs = node.kwargs
    # `linalg_vector_norm(self, ord, dim, keepdim, *, dtype)` from `_foreach_norm(self, ord, dtype)`
    if op is NORM:
        order = args[1] if len(args) > 1 else 2
        dtype = args[2] if len(args) > 2 else None
        args, kwargs = [args[0], order, None, False], (("dtype", dtype), *kwargs)
    elif len(args) == 4:  # addcdiv, addcmul, where `value` is keyword-only
        kwargs = (("value", args.pop()),)
    is_new = bool(node.outs)
    return Node(
        facts=facts_of(op),
        args=tuple(args),
        kwargs=kwargs,
        outs=(node.outs[i],) if is_new else (),
        specs=(node.specs[i],) if is_new else (),
        is_single=True,
        writes=() if is_new else (node.writes[i],),
        view_of=None,
        where=node.where,
        in_backward=node.in_backward,
    )
