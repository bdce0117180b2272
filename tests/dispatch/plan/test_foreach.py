"""Foreach ops taken apart give what torch gives, and one kernel serves equal tensors."""

from itertools import islice

import pytest
import torch
from torch.testing._internal.common_methods_invocations import (
    foreach_binary_op_db,
    foreach_other_op_db,
    foreach_pointwise_op_db,
    foreach_reduce_op_db,
    foreach_unary_op_db,
)

from lazy_tensor import is_pending, lazy_mode, materialize
from lazy_tensor.dispatch.plan.foreach import expand_foreach, op_of_each
from lazy_tensor.dispatch.plan.graph import graph_of
from lazy_tensor.dispatch.plan.interpret import interpret
from lazy_tensor.dispatch.run.tape import Tape
from lazy_tensor.dispatch.trie.trace import local

N_SAMPLES = 12
FOREACH = [
    *foreach_unary_op_db, *foreach_binary_op_db, *foreach_pointwise_op_db, *foreach_reduce_op_db,
    *foreach_other_op_db,
]  # fmt: skip


def lists_in(sample):
    return [a for a in (sample.input, *sample.args) if isinstance(a, list)]


def copied(sample):
    return sample.transform(lambda t: t.detach().clone() if isinstance(t, torch.Tensor) else t)


def taken_apart_and_run(call):
    """What `call` records, run with its foreach ops taken apart; the ops that were run."""
    with lazy_mode(backend="aten"):
        call()
        pending = local.trace.pending()
        local.trace.reset()
    graph = expand_foreach(graph_of(pending.state.steps(), ()))
    interpret(graph, pending.leaves, pending.scalars)
    return [node.facts.op for node in graph.nodes]


def taken_apart_and_run_on_tape(call):
    """The same where counts are recorded too."""
    with lazy_mode():
        tape = Tape(local.trace)
        try:
            return taken_apart_and_run(call)
        finally:
            tape.take_off()


@pytest.mark.parametrize("info", FOREACH, ids=lambda info: info.name)
def test_in_place_each_tensor_gets_what_torch_gives(info):
    if info.inplace_variant is None:
        pytest.skip("it has no in-place form")
    n_apart = 0
    samples = info.sample_inputs("cpu", torch.float32, noncontiguous=False, num_input_tensors=[3])
    for sample in islice(samples, N_SAMPLES):
        if not sample.input or any(isinstance(a, torch.Tensor) for a in sample.args):
            continue
        mine, theirs = copied(sample), copied(sample)
        kwargs = {k: v for k, v in sample.kwargs.items() if k not in ("values", "is_fastpath")}
        try:
            info.inplace_variant(theirs.input, *theirs.args, **kwargs)
        except RuntimeError:
            continue
        ops = taken_apart_and_run(
            lambda mine=mine, kwargs=kwargs: info.inplace_variant(mine.input, *mine.args, **kwargs)
        )
        n_apart += all("_foreach" not in op._schema.name for op in ops)
        for a, b in zip(mine.input, theirs.input, strict=True):
            assert torch.equal(a.nan_to_num(), b.nan_to_num()), ops
    assert n_apart


@pytest.mark.parametrize(
    "program",
    [
        lambda ts: torch._foreach_sqrt(ts),
        lambda ts: torch._foreach_norm(ts),
        lambda ts: torch._foreach_norm(ts, 1),
        lambda ts: torch._foreach_norm(ts, 2, dtype=torch.float64),
        lambda ts: torch._foreach_max(ts),
        lambda ts: torch._foreach_add(ts, ts, alpha=3),
        lambda ts: torch._foreach_mul(ts, ts[0].sum()),
        lambda ts: torch._foreach_div(ts, [1.0, 2.0, 4.0]),
        lambda ts: torch._foreach_pow(ts, 2),
        lambda ts: torch._foreach_maximum(ts, 0.5),
        lambda ts: torch._foreach_addcdiv(ts, ts, ts, [0.5, 1.0, 2.0]),
        lambda ts: torch._foreach_lerp(ts, ts[::-1], 0.3),
        *([torch._foreach_clone] if hasattr(torch, "_foreach_clone") else []),
    ],
)
def test_new_results_are_torchs(program, counting):
    tensors = [torch.rand(4, 3) + 0.1 for _ in range(3)]
    expected = program(tensors)
    for _ in range(3):
        with lazy_mode():
            got = program(tensors)
    assert all(map(torch.equal, materialize(got), expected))


def test_foreach_ops_that_the_table_lacks_stay():
    assert op_of_each(torch.ops.aten._foreach_addcmul_.Tensor) is None
    assert op_of_each(torch.ops.aten._foreach_pow.ScalarAndTensor) is None
    assert op_of_each(torch.ops.aten.add.Tensor) is None
    assert op_of_each(torch.ops.aten._foreach_add.List_out) is None


@pytest.mark.parametrize("foreach", [False, True])
def test_equal_parameters_share_one_kernel_whatever_the_learning_rate(foreach, counting):
    params = [torch.nn.Parameter(torch.randn(16, 16)) for _ in range(12)]
    params += [torch.nn.Parameter(torch.randn(16)) for _ in range(12)]
    optimizer = torch.optim.Adam(params, lr=0.1, foreach=foreach)
    memory = [p.data_ptr() for p in params]
    n_compiled = []
    for step in range(8):
        for group in optimizer.param_groups:
            group["lr"] = 0.1 / (step + 1)
        for p in params:
            p.grad = torch.randn_like(p)
        with lazy_mode():
            optimizer.step()
        n_compiled.append(len(counting.segments))
    # two shapes: in the step that makes the state, in the next, and once numbers turn out to change
    assert n_compiled[1] - n_compiled[0] == 2
    assert n_compiled[2:] == [n_compiled[1] + 2] * 6
    assert all(len(segment.calls) == 7 for segment in counting.segments[-2:])
    assert [p.data_ptr() for p in params] == memory


def test_foreach_calls_on_counts_stay_whole():
    counts = [torch.zeros(()) for _ in range(5)]
    ops = taken_apart_and_run_on_tape(lambda: torch._foreach_add_(counts, 1))
    assert counts == [1] * 5
    assert ops == [torch.ops.aten._foreach_add_.Scalar]


def test_tensors_multiplied_by_themselves_stay_pending():
    tensors = [torch.rand(3), torch.rand(4)]
    expected = [t * t for t in tensors]
    with lazy_mode():
        mine = [t + 0 for t in tensors]
        torch._foreach_mul_(mine, mine)
        assert all(map(is_pending, mine))
    for a, b in zip(mine, expected, strict=True):
        assert torch.equal(materialize(a), b)
