"""Foreach ops taken apart, so that what several do to one tensor can be fused.

In: a graph. Out: the graph with one call a tensor in place of each foreach call that the table
knows. On the CPU torch computes foreach ops by these very calls.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import torch
from torch._ops import OpOverload

from lazy_tensor.dispatch.graph import Graph, with_nodes
from lazy_tensor.dispatch.schema import facts_of
from lazy_tensor.dispatch.trace import Node

aten = torch.ops.aten


def _names(text: str) -> frozenset[str]:
    return frozenset(text.split())


UNARY = _names(
    """abs acos asin atan ceil clone cos cosh erf erfc exp expm1 floor frac lgamma log log10 log1p
    log2 max neg reciprocal round rsqrt sigmoid sign sin sinh sqrt tan tanh trunc zero"""
)
DEFAULT = _names("addcdiv addcmul copy")
BINARY = {
    "add": ("Tensor", "Tensor"), "sub": ("Tensor", "Tensor"), "mul": ("Tensor", "Tensor"),
    "div": ("Tensor", "Tensor"), "clamp_min": ("default", "Tensor"),
    "clamp_max": ("default", "Tensor"), "pow": ("Tensor_Scalar", "Tensor_Tensor"),
    "pow_": ("Scalar", "Tensor"), "lerp": ("Scalar", "Tensor"),
}  # fmt: skip
"""The overloads for a number and for a tensor."""
SAME_AS = {"maximum": "clamp_min", "minimum": "clamp_max"}
NORM = aten.linalg_vector_norm.default


def taken_apart(graph: Graph) -> Graph:
    """`graph` with foreach calls on CPU tensors replaced by calls on their tensors."""
    nodes = [
        part
        for node in graph.nodes
        for part in ([node] if _is_elsewhere(graph, node) else parts_of(node))
    ]
    return graph if len(nodes) == len(graph.nodes) else with_nodes(graph, nodes)


@cache
def op_of_each(op: OpOverload) -> OpOverload | None:
    """What the foreach op `op` does to each tensor; None for all that the table doesn't know."""
    namespace, _, name = op._schema.name.partition("::_foreach_")
    if namespace != "aten" or not name or op._overloadname.endswith("out"):
        return None
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


def _is_elsewhere(graph: Graph, node: Node) -> bool:
    return any(graph.spec[slot].device.type != "cpu" for slot in node.reads)


def parts_of(node: Node) -> list[Node]:
    """A foreach call's calls on its tensors; any other call itself."""
    op = op_of_each(node.facts.op)
    return [node] if op is None else [_part(node, op, i) for i in range(len(node.args[0]))]


def _part(node: Node, op: OpOverload, i: int) -> Node:
    args: list[Any] = [a[i] if type(a) is tuple else a for a in node.args]
    kwargs = node.kwargs
    if op is NORM:
        order = args[1] if len(args) > 1 else 2
        dtype = args[2] if len(args) > 2 else None
        args, kwargs = [args[0], order, None, False], (("dtype", dtype), *kwargs)
    elif len(args) == 4:  # addcdiv, addcmul
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
