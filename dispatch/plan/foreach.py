"""Foreach ops taken apart, so that what several do to one tensor can be fused; counts put together.

In: a graph. Out: the graph with one call a tensor in place of each foreach call that the table
knows, and one foreach call in place of many that count a step each. On the CPU torch computes
foreach ops by these very calls.
"""

from __future__ import annotations

from collections import Counter, defaultdict
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
DEFAULT = _names("addcdiv addcmul copy")
BINARY = {
    "add": ("Tensor", "Tensor"), "sub": ("Tensor", "Tensor"), "mul": ("Tensor", "Tensor"),
    "div": ("Tensor", "Tensor"), "clamp_min": ("default", "Tensor"),
    "clamp_max": ("default", "Tensor"), "pow": ("Tensor_Scalar", "Tensor_Tensor"),
    "pow_": ("Scalar", "Tensor"), "lerp": ("Scalar", "Tensor"),
}  # fmt: skip
"""The overloads for a number and for a tensor."""
COUNT = aten.add_.Tensor
SAME_AS = {"maximum": "clamp_min", "minimum": "clamp_max"}
NORM = aten.linalg_vector_norm.default


def taken_apart(graph: Graph) -> Graph:
    """`graph` with foreach calls on CPU tensors replaced by calls on their tensors, and calls that
    count by foreach calls."""
    nodes = [
        part
        for node in graph.nodes
        for part in (parts_of(node) if _is_worth_taking_apart(graph, node) else [node])
    ]
    nodes = _with_counts_together(graph, nodes)
    return graph if nodes == graph.nodes else with_nodes(graph, nodes)


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


def _is_worth_taking_apart(graph: Graph, node: Node) -> bool:
    """Whether it is a foreach call that the table knows, on the CPU, and on more than numbers."""
    if op_of_each(node.facts.op) is None:
        return False
    specs = [graph.spec[slot] for slot in node.reads]
    return all(spec.device.type == "cpu" for spec in specs) and any(spec.size for spec in specs)


def _with_counts_together(graph: Graph, nodes: list[Node]) -> list[Node]:
    """The nodes with calls of `count.add_(1)` replaced by one foreach call.

    Only of counts that nothing else makes or uses, so that it doesn't matter when they are written.
    """
    alike: dict[tuple[Any, ...], list[Node]] = defaultdict(list)
    for node in nodes:
        if node.facts.op is COUNT and not node.kwargs and type(node.args[1]) in (int, float):
            spec = graph.spec[node.args[0].index]
            if not spec.size and spec.device.type == "cpu":
                alike[type(node.args[1]), node.args[1], spec.dtype].append(node)
    if not alike:
        return nodes
    n_uses = Counter(
        graph.root[slot]
        for node in nodes
        for slot in {*node.reads, *node.writes, *node.outs}
        if slot is not None
    )
    instead: dict[int, Node | None] = {}
    for counts in alike.values():
        alone = [node for node in counts if n_uses[graph.root[node.args[0].index]] == 1]
        if len(alone) > 1:
            instead.update((id(node), None) for node in alone)
            instead[id(alone[0])] = _together(alone)
    found = [instead.get(id(node), node) for node in nodes]
    return [node for node in found if node is not None]


def _together(counts: list[Node]) -> Node:
    first = counts[0]
    slots = tuple([node.args[0].index for node in counts])
    return Node(
        facts=facts_of(aten._foreach_add_.Scalar),
        args=(tuple([node.args[0] for node in counts]), first.args[1]),
        kwargs=(),
        outs=(),
        specs=(),
        is_single=True,
        writes=slots,
        view_of=None,
        where=first.where,
        in_backward=first.in_backward,
    )


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
