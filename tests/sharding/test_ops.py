"""PyTorch's operator database on sharded arguments: placements don't change the result."""

from __future__ import annotations

import itertools
import math
from typing import Any

import pytest
import torch
from torch.testing._internal.common_methods_invocations import op_db
from torch.utils import _pytree as pytree

import lazy_tensor
from lazy_tensor.dispatch.trie.trace import local
from lazy_tensor.sharding import DTensor, Replicate, Shard, distribute_tensor, init_device_mesh
from tests.conformance.op_programs import samples_of
from tests.conformance.spread import number_of, spread
from tests.sharding.ranks import run_on_ranks

pytestmark = pytest.mark.filterwarnings("ignore")

MESHES = ((2,), (3,), (2, 3))
MOST_PLACEMENTS = 6
"""Combinations of placements tried for a sample in a default run; a spread of all."""

LEFT_OUT = {
    "empty", "empty_like", "empty_permuted", "empty_strided", "new_empty", "new_empty_strided",
}  # fmt: skip
"""Uninitialized memory has no value."""
RANDOM = {
    "bernoulli", "cauchy", "exponential", "geometric", "log_normal", "multinomial", "normal",
    "rand_like", "randint", "randint_like", "randn", "randn_like", "uniform",
}  # fmt: skip


ONCE_WRONG = {"nn.functional.adaptive_max_pool3d": (2, 3), "view_copy": (2,)}
"""Ops of which a default run tries one mesh more: that on which torch's rules were wrong."""


def is_left_out(op):
    name = op.name.removeprefix("nn.functional.")
    return (
        name in LEFT_OUT
        or op.variant_test_name == "partial_views"  # what lies around a view stays where it is
        or name in RANDOM
        or "dropout" in name
        or name in ("multi_head_attention_forward", "to_sparse", "scaled_dot_product_attention")
        or any(
            part in name for part in ("rrelu", "fractional_max_pool", "pca_lowrank", "svd_lowrank")
        )
        or not op.supports_dtype(torch.float32, "cpu")
        or torch.float32 not in op.dtypes
    )


OPS = [op for op in op_db if not is_left_out(op)]


def pytest_generate_tests(metafunc):
    is_full = metafunc.config.getoption("full")
    meshes = MESHES if is_full else MESHES[:1]
    ops = OPS if is_full else [op for op in OPS if number_of(op.formatted_name) % 8 == 0]
    cases: list[tuple[Any, Any]] = [(op, mesh) for op in ops for mesh in meshes]
    cases += [(op, ONCE_WRONG[op.name]) for op in OPS if op.name in ONCE_WRONG and not is_full]
    metafunc.parametrize(
        ("op", "shape"), cases, ids=[f"{op.formatted_name}-{mesh}" for op, mesh in cases]
    )


def placements_for(tensor, n_dims):
    """All ways to place a tensor on a mesh."""
    one = [Replicate(), *(Shard(dim) for dim in range(tensor.dim()))]
    return list(itertools.product(one, repeat=n_dims))


def is_tensor(leaf):
    return isinstance(leaf, torch.Tensor)


def run(op, sample, change):
    """The op on a sample whose tensors are changed."""
    args, kwargs = pytree.tree_map(
        lambda leaf: change(leaf) if is_tensor(leaf) else leaf,
        ((sample.input, *sample.args), sample.kwargs),
    )
    return op(*args, **kwargs)


def whole(result):
    return pytree.tree_map(
        lambda leaf: leaf.full_tensor() if isinstance(leaf, DTensor) else leaf, result
    )


def programs_of(op, n_dims, n_samples, most):
    """Samples, their one-process results, and ways to place their tensors."""
    for _, sample in spread(samples_of(op, torch.float32), n_samples, op.formatted_name):
        leaves = pytree.tree_leaves(((sample.input, *sample.args), sample.kwargs))
        tensors = [leaf for leaf in leaves if is_tensor(leaf)]
        if not tensors or any(t.layout is not torch.strided for t in tensors):
            continue
        if op.name == "tensor_split" and len(tensors) > 1:
            continue  # C++ reads the indices above dispatch
        try:
            expected = run(op, sample, lambda tensor: tensor.clone())
        except Exception:
            continue
        every = itertools.product(*(placements_for(tensor, n_dims) for tensor in tensors))
        ways = list(itertools.islice(every, 4096))
        for way in ways[:: max(1, len(ways) // most)]:
            yield sample, expected, way


def check(op, sample, expected, way, mesh):
    """The op on tensors placed so, recorded twice: the second time it is a hit. Then unrecorded,
    three times: torch's rules are asked, then the sizes, and then all is known."""
    for is_recorded in (True, True, False, False, False):
        local.trace.policy.cold = 0 if is_recorded else 1 << 40
        left = list(way)
        try:
            result = run(
                op,
                sample,
                lambda tensor, left=left: distribute_tensor(
                    tensor.detach(), mesh, left.pop(0), src_data_rank=None
                ),
            )
            result = whole(result)
        except RuntimeError as error:
            if "got mixed torch.Tensor and DTensor" in str(error):
                return  # the op's Python makes plain tensors
            raise
        torch.testing.assert_close(
            lazy_tensor.materialize(result), expected, rtol=1e-4, atol=1e-4, equal_nan=True,
            check_stride=False, msg=lambda text: f"{way}\n{text}",
        )  # fmt: skip


def test_every_placement_gives_the_one_process_result(op, shape, request):
    is_full = request.config.getoption("full")
    n_samples, most = (6, 24) if is_full else (1, MOST_PLACEMENTS)
    programs = list(programs_of(op, len(shape), n_samples, most))
    if not programs:
        pytest.skip("no sample is made of dense tensors")

    def body():
        mesh = init_device_mesh("cpu", shape)
        for sample, expected, way in programs:
            check(op, sample, expected, way, mesh)

    run_on_ranks(math.prod(shape), body)
