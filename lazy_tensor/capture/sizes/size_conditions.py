"""What sizes have to be for torch to make the same calls, though no Python has compared them.

In: the merged steps of calls of several sizes, and what tells a size by a text. Out: texts that
must be true. Called by `any_size`.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator

import torch

from lazy_tensor.capture.outline import named
from lazy_tensor.capture.sizes.merged_steps import MergedSteps
from lazy_tensor.capture.sizes.size_texts import TOO_SMALL, Column
from lazy_tensor.capture.watched_object import Obstacle
from lazy_tensor.dispatch.traced_sizes import LEAST
from lazy_tensor.dispatch.trie.trace import Node
from lazy_tensor.kernels.segment import base_name

TextOf = Callable[[Column], str]
"""Tells a size by a text; Obstacle if it follows from no other."""


def conditions_of(steps: MergedSteps, symbols: list[Column], text_of: TextOf) -> list[str]:
    """All conditions, as texts. Obstacle if the calls don't meet them, or if it isn't known how the
    sizes of what an op gives follow from others."""
    for node in steps.steps:
        if isinstance(node, Node) and not _is_followed(steps, node):
            raise Obstacle(f"sizes aren't followed through {named(node)}")
    orders = _orders([*symbols, *steps.sizes()], text_of)
    return [*_sizes(steps, text_of), *orders, *_parts(steps, text_of), *_gaps(steps, text_of)]


def _is_followed(steps: MergedSteps, node: Node) -> bool:
    if steps.varying.isdisjoint((*node.makes, *node.reads)):
        return True
    name = base_name(node.facts.op)
    return torch.Tag.pointwise in node.facts.op.tags or name in FOLLOWED or name.endswith(_ENDS)


def _sizes(steps: MergedSteps, text_of: TextOf) -> Iterator[str]:
    """What has no elements, or one, is broadcast or skipped by rules of its own."""
    for column in steps.sizes():
        if min(column) < LEAST:
            raise Obstacle(TOO_SMALL)
        yield f"{text_of(column)} >= {LEAST}"


def _orders(sizes: list[Column], text_of: TextOf) -> Iterator[str]:
    """Which of two sizes is larger: Python's `x[:n]` makes no slice where n is."""
    columns = list(dict.fromkeys(sizes))[:MOST_COMPARED]
    for some, others in itertools.combinations(columns, 2):
        if all(a < b for a, b in zip(some, others, strict=True)):
            yield f"{text_of(some)} < {text_of(others)}"
        elif all(a > b for a, b in zip(some, others, strict=True)):
            yield f"{text_of(some)} > {text_of(others)}"


def _parts(steps: MergedSteps, text_of: TextOf) -> Iterator[str]:
    """A part of a tensor isn't all of it: Python's `x[:n]` makes no slice then."""
    for node in steps.slices:
        of_base, of_part = steps.specs[node.reads[0]], steps.specs[node.makes[0]]
        n = len(of_base)
        for sizes in zip(*[one.size for one in (*of_base, *of_part)], strict=True):
            base, part = sizes[:n], sizes[n:]
            varies = len({*base}) > 1 or len({*part}) > 1
            if varies and all(a > b for a, b in zip(base, part, strict=True)):
                yield f"{text_of(base)} > {text_of(part)}"


def _gaps(steps: MergedSteps, text_of: TextOf) -> Iterator[str]:
    """Which neighbouring dimensions have no gap between them in memory: those are one dimension to
    `reshape`, which is a view then, and `contiguous()` copies only what has gaps."""
    for specs in steps.specs.values():
        if len({*specs}) < 2:
            continue
        sizes = list(zip(*[spec.size for spec in specs], strict=True))
        strides = list(zip(*[spec.stride for spec in specs], strict=True))
        for i in range(len(sizes) - 1):
            rows = list(zip(strides[i], strides[i + 1], sizes[i + 1], strict=True))
            are_one = {outer == inner * n for outer, inner, n in rows}
            if len(are_one) > 1:
                raise Obstacle("a tensor has gaps in memory at some sizes alone")
            if len({*rows}) > 1:
                texts = text_of(strides[i]), text_of(strides[i + 1]), text_of(sizes[i + 1])
                sign = "==" if are_one.pop() else "!="
                yield f"{texts[0]} {sign} {texts[1]} * {texts[2]}"


MOST_COMPARED = 12
"""Sizes whose order is compared: all pairs of them are, at each replay."""
FOLLOWED = frozenset({
    "_adaptive_avg_pool2d", "_adaptive_avg_pool3d", "_fused_rms_norm", "_local_scalar_dense",
    "_log_softmax", "_native_batch_norm_legit", "_native_batch_norm_legit_no_training",
    "_native_multi_head_attention", "_reshape_alias", "_scaled_dot_product_efficient_attention",
    "_scaled_dot_product_flash_attention", "_scaled_dot_product_flash_attention_for_cpu",
    "_softmax", "_to_copy", "_unsafe_index", "_unsafe_view", "addbmm", "addmm", "addmv",
    "alias", "all", "amax", "amin", "any", "arange", "argmax", "argmin", "avg_pool1d",
    "avg_pool2d", "avg_pool3d", "baddbmm", "bernoulli", "binary_cross_entropy", "bmm",
    "bucketize", "cat", "clone", "constant_pad_nd", "convolution", "copy", "cumprod", "cumsum",
    "detach", "dot", "embedding", "empty", "empty_like", "expand", "fill", "flip", "full",
    "full_like", "gather", "huber_loss", "index", "index_add", "index_copy", "index_fill",
    "index_put", "index_select", "lift_fresh", "linalg_vector_norm", "linear", "logcumsumexp",
    "logsumexp", "masked_fill", "masked_scatter", "max", "max_pool2d_with_indices",
    "max_pool3d_with_indices", "mean", "min", "mm", "mse_loss", "mul", "mv",
    "native_batch_norm", "native_dropout", "native_group_norm", "native_layer_norm",
    "new_empty", "new_full", "new_ones", "new_zeros", "nll_loss", "nll_loss2d_forward",
    "nll_loss_forward", "norm", "ones", "ones_like", "permute", "prod", "rand", "rand_like",
    "randn", "randn_like", "repeat", "roll", "scalar_tensor", "scatter", "scatter_add",
    "scatter_reduce", "searchsorted", "select", "select_scatter", "slice", "slice_scatter",
    "smooth_l1_loss", "soft_margin_loss", "sort", "split", "split_with_sizes", "squeeze",
    "stack", "std", "std_mean", "sum", "t", "topk", "transpose", "tril", "triu", "unbind",
    "uniform", "unsqueeze", "var", "var_mean", "view", "where", "zero", "zeros", "zeros_like",
})  # fmt: skip
"""Ops whose results' sizes are given, or sums, products and exact quotients of others."""
_ENDS = ("_backward", "_backward_data", "_forward", "_backward_for_cpu")
"""Ends of the names of ops whose results have the sizes of their arguments."""
