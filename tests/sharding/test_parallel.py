"""Tensor and sequence parallel training on ranks, against the same training in one process."""

from __future__ import annotations

import copy
import math

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn

import lazy_tensor
from lazy_tensor.dispatch.trie import tensor_types
from lazy_tensor.dispatch.trie.trace import Node, local
from lazy_tensor.sharding import (
    ColwiseParallel,
    DTensor,
    Partial,
    PrepareModuleInput,
    PrepareModuleOutput,
    Replicate,
    RowwiseParallel,
    SequenceParallel,
    Shard,
    distribute_tensor,
    init_device_mesh,
    loss_parallel,
    parallelize_module,
)
from lazy_tensor.sharding.ops import calls
from tests.sharding.ranks import run_on_ranks

WIDTH, HEADS, WORDS = 8, 2, 12


class Mlp(nn.Module):
    def __init__(self):
        super().__init__()
        self.up = nn.Linear(WIDTH, 4 * WIDTH)
        self.down = nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x):
        return self.down(F.gelu(self.up(x)))


class Attention(nn.Module):
    """Heads are what is left of the width on a rank."""

    def __init__(self):
        super().__init__()
        self.q, self.k, self.v, self.out = (nn.Linear(WIDTH, WIDTH) for _ in range(4))

    def forward(self, x):
        batch, length, _ = x.shape

        def heads(y):
            return y.view(batch, length, -1, WIDTH // HEADS).transpose(1, 2)

        y = F.scaled_dot_product_attention(
            heads(self.q(x)), heads(self.k(x)), heads(self.v(x)), is_causal=True
        )
        return self.out(y.transpose(1, 2).reshape(batch, length, -1))


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.attention, self.mlp = Attention(), Mlp()

    def forward(self, x):
        x = x + self.attention(self.norm1(x))
        return x + self.mlp(self.norm2(x))


class Words(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(WORDS, WIDTH)
        self.block = Block()
        self.head = nn.Linear(WIDTH, WORDS, bias=False)

    def forward(self, words):
        return self.head(self.block(self.embed(words)))


TENSOR = {
    "attention.q": ColwiseParallel(), "attention.k": ColwiseParallel(),
    "attention.v": ColwiseParallel(), "attention.out": RowwiseParallel(),
    "mlp.up": ColwiseParallel(), "mlp.down": RowwiseParallel(),
}  # fmt: skip
SEQUENCE = {
    "norm1": SequenceParallel(), "norm2": SequenceParallel(),
    "attention": PrepareModuleInput(
        input_layouts=(Shard(1),), desired_input_layouts=(Replicate(),)
    ),
    "mlp": PrepareModuleInput(input_layouts=(Shard(1),), desired_input_layouts=(Replicate(),)),
    **TENSOR,
    "attention.out": RowwiseParallel(output_layouts=Shard(1), use_local_output=False),
    "mlp.down": RowwiseParallel(output_layouts=Shard(1), use_local_output=False),
}  # fmt: skip


def train(model, batches, loss_of, n_steps=4, lr=0.1, optimizer=torch.optim.SGD):
    optimizer = optimizer(model.parameters(), lr=lr)
    losses = []
    for step in range(n_steps):
        optimizer.zero_grad()
        loss = loss_of(model, *batches[step % len(batches)])
        loss.backward()
        optimizer.step()
        losses.append(loss.detach())
    return losses


def square_loss(model, x, target):
    return (model(x) - target).square().mean()


def whole(tensor):
    full = tensor.full_tensor() if isinstance(tensor, DTensor) else tensor
    return lazy_tensor.materialize(full.detach())


def compare(build, plan, batches, loss_of, world_size=2, prepare=None, **options):
    torch.manual_seed(1)
    model = build()
    expected_model = copy.deepcopy(model)
    expected = train(expected_model, batches, loss_of, **options)

    def body():
        mesh = init_device_mesh("cpu", (world_size,))
        ours = copy.deepcopy(model)
        parallelize_module(ours, mesh, plan)
        if prepare is not None:
            prepare(ours, mesh)
        losses = [whole(loss) for loss in train(ours, batches, loss_of, **options)]
        weights = {name: whole(p) for name, p in ours.named_parameters()}
        return losses, weights

    for losses, weights in run_on_ranks(world_size, body):
        torch.testing.assert_close(losses, expected)
        for name, parameter in expected_model.named_parameters():
            torch.testing.assert_close(weights[name], parameter.detach(), msg=name)


def images(n=2):
    return [(torch.randn(3, 4, WIDTH), torch.randn(3, 4, WIDTH)) for _ in range(n)]


@pytest.mark.parametrize("optimizer", [torch.optim.SGD, torch.optim.AdamW])
def test_mlp(optimizer):
    plan = {"up": ColwiseParallel(), "down": RowwiseParallel()}
    compare(Mlp, plan, images(), square_loss, optimizer=optimizer)


def test_block_with_heads_split():
    compare(Block, TENSOR, images(), square_loss)


def test_block_with_the_sequence_split():
    part, everywhere = (Shard(1),), (Replicate(),)

    def in_and_out(model, mesh):
        into = PrepareModuleInput(input_layouts=everywhere, desired_input_layouts=part)
        out = PrepareModuleOutput(output_layouts=part, desired_output_layouts=everywhere)
        parallelize_module(model, mesh, into)
        parallelize_module(model, mesh, out)

    compare(Block, SEQUENCE, images(), square_loss, prepare=in_and_out)


def cross_entropy(model, words, targets):
    with loss_parallel():
        logits = model(words)
        return F.cross_entropy(logits.flatten(0, 1), targets.flatten())


def test_words_with_the_vocabulary_split():
    plan = {
        "embed": RowwiseParallel(input_layouts=Replicate()),
        **{f"block.{name}": copy.deepcopy(style) for name, style in TENSOR.items()},
        "head": ColwiseParallel(),
    }
    batches = [(torch.randint(WORDS, (2, 4)), torch.randint(WORDS, (2, 4))) for _ in range(2)]

    def plain_loss(model, words, targets):
        return F.cross_entropy(model(words).flatten(0, 1), targets.flatten())

    plan["head"] = ColwiseParallel(output_layouts=Replicate())
    compare(Words, plan, batches, plain_loss)


def test_loss_stays_sharded_by_class():
    logits = torch.randn(6, 8)
    targets = torch.randint(8, (6,))
    leaf = logits.clone().requires_grad_()
    expected = F.cross_entropy(leaf, targets)
    expected.backward()

    def body():
        mesh = init_device_mesh("cpu", (2,))
        for _ in range(2):
            ours = distribute_tensor(logits, mesh, [Shard(1)]).requires_grad_()
            lazy_tensor.reset_stats()
            with loss_parallel():
                loss = F.cross_entropy(ours, targets)
                loss.backward()
            dist.barrier()  # the ranks are threads here, and it holds for all
            assert ours.grad.placements == (Shard(1),)
            torch.testing.assert_close(whole(loss), expected.detach())
            torch.testing.assert_close(whole(ours.grad), leaf.grad)
        outside = F.cross_entropy(ours.detach(), distribute_tensor(targets, mesh, [Replicate()]))
        torch.testing.assert_close(whole(outside), expected.detach())

    run_on_ranks(2, body)


def recorded_collectives():
    """The collectives that this rank has recorded and not yet issued, in order."""
    steps = local.trace.state.steps()
    nodes = [s for s in steps if isinstance(s, Node) and s.issues]
    return [node.facts.op._schema.name.removeprefix("_c10d_functional::") for node in nodes]


@pytest.mark.recorded
def test_collectives_of_an_mlp_are_counted():
    def body():
        mesh = init_device_mesh("cpu", (2,))
        model = parallelize_module(
            Mlp(), mesh, {"up": ColwiseParallel(), "down": RowwiseParallel()}
        )
        for _ in range(3):
            with lazy_tensor.lazy_mode():
                x = torch.randn(3, WIDTH, requires_grad=True)
                model(x).sum().backward()
                assert recorded_collectives() == ["all_reduce", "all_reduce"]

    run_on_ranks(2, body)


@pytest.mark.recorded
def test_a_settled_step_asks_nothing(monkeypatch):
    seen = []
    call = calls.call

    def noting(trace, request):
        seen.append(request.op)
        return call(trace, request)

    monkeypatch.setattr(tensor_types, "call_sharded", noting)
    batches = images(1)

    def body():
        mesh = init_device_mesh("cpu", (2,))
        model = parallelize_module(Block(), mesh, copy.deepcopy(TENSOR))
        with lazy_tensor.lazy_mode():  # entering it makes the other rank's trace begin anew
            for _ in range(8):
                dist.barrier()
                seen.clear()
                dist.barrier()
                train(model, batches, square_loss, n_steps=2)
                lazy_tensor.flush()

    run_on_ranks(2, body)
    assert not seen


def test_ranks_may_flush_where_others_do_not():
    def body():
        mesh = init_device_mesh("cpu", (2,))
        model = parallelize_module(Block(), mesh, copy.deepcopy(TENSOR))
        losses = []
        for step in range(6):
            x = torch.full((1, 4, WIDTH), 0.1 * (step % 2))
            loss = model(x).square().mean()
            if dist.get_rank() == step % 2:
                losses.append(loss.item())  # this rank alone
            loss.backward()
            if dist.get_rank() == 1 and step == 3:
                lazy_tensor.flush()
        return [whole(p.grad) for p in model.parameters()]

    torch.manual_seed(2)
    first, second = run_on_ranks(2, body)
    for mine, theirs in zip(first, second, strict=True):
        assert torch.equal(mine, theirs)


def test_a_direct_collective_comes_after_what_was_recorded():
    def body():
        mesh = init_device_mesh("cpu", (2,))
        tensor = distribute_tensor(torch.ones(4), mesh, [Shard(0)])
        total = tensor.sum()  # partial: reduced when it is asked for
        reduced = total.redistribute(placements=[Replicate()])
        assert lazy_tensor.is_pending(reduced)
        counter = torch.ones(1)
        dist.all_reduce(counter)
        assert not lazy_tensor.is_pending(reduced)
        assert counter.item() == 2
        return whole(reduced).item()

    assert run_on_ranks(2, body) == [4.0, 4.0]


@pytest.mark.recorded
@pytest.mark.parametrize(("bucket_bytes", "n_reductions"), [(1 << 20, 1), (100, 3), (1, 5)])
def test_small_reductions_of_one_call_go_together(bucket_bytes, n_reductions):
    sizes = [(4, 5), (3,), (), (7, 3), (2, 2, 2)]  # in bytes: 80, 12, 4, 84, 32

    def tensors(factor=1.0):
        return [torch.arange(math.prod(s)).float().reshape(s).mul(factor) for s in sizes]

    def body():
        mesh = init_device_mesh("cpu", (2,))
        rank = dist.get_rank()
        for _ in range(3):
            with lazy_tensor.lazy_mode(bucket_bytes=bucket_bytes):
                found = [distribute_tensor(t, mesh, [Replicate()]) for t in tensors()]
                lazy_tensor.flush()
                partial = [
                    DTensor.from_local(t, mesh, [Partial("avg")]) for t in tensors(1.0 + rank)
                ]
                torch._foreach_add_(found, partial)
                assert recorded_collectives() == ["all_reduce"] * n_reductions
        return [whole(t) for t in found]

    expected = [t + t * 1.5 for t in tensors()]
    for found in run_on_ranks(2, body):
        torch.testing.assert_close(found, expected)


class Tied(nn.Module):
    """Two layers with one parameter, gathered by each, under two names."""

    def __init__(self):
        super().__init__()
        self.first = nn.Linear(WIDTH, WIDTH, bias=False)
        self.second = nn.Linear(WIDTH, WIDTH, bias=False)
        self.between = nn.Linear(WIDTH, WIDTH, bias=False)
        self.second.weight = self.first.weight

    def forward(self, x, look=lambda x: None):
        for layer in (self.first, self.between, self.second):
            weight = layer.weight
            if isinstance(weight, DTensor):
                weight = weight.redistribute(placements=[Replicate()]).to_local()
            x = torch.tanh(F.linear(x, weight))
            look(x)
        return x


def tied():
    torch.manual_seed(0)
    return Tied()


def tied_on(mesh, plain):
    model = copy.deepcopy(plain)
    for layer in (model.first, model.between):
        layer.weight = nn.Parameter(distribute_tensor(layer.weight.detach(), mesh, [Shard(0)]))
    model.second.weight = model.first.weight
    return model


def trained_tied(model, look=lambda x: None):
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    counts = []
    for step in range(4):
        with lazy_tensor.lazy_mode():
            x = torch.linspace(-1, 1, 3 * WIDTH).view(3, WIDTH) + step
            loss = model(x, look).square().mean()
            counts.append(recorded_collectives().count("all_gather_into_tensor"))
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
    return [whole(p) for p in model.parameters()], counts


@pytest.mark.recorded
def test_a_parameter_of_two_layers_is_gathered_once():
    plain = tied()
    expected, _ = trained_tied(copy.deepcopy(plain))

    def body():
        return trained_tied(tied_on(init_device_mesh("cpu", (2,)), plain))

    for found, counts in run_on_ranks(2, body):
        assert counts == [3, 2, 2, 2]  # from the second time on it is known to be gathered twice
        torch.testing.assert_close(found, expected)


def test_what_is_shared_does_not_depend_on_flushes():
    plain = tied()
    expected, _ = trained_tied(copy.deepcopy(plain))

    def body():
        model = tied_on(init_device_mesh("cpu", (2,)), plain)
        look = (lambda x: x.sum().item()) if dist.get_rank() == 0 else lambda x: None
        return trained_tied(model, look)

    for found, _ in run_on_ranks(2, body):
        torch.testing.assert_close(found, expected)


@pytest.mark.parametrize("how", ["itself", "data", "view", "view alone", "local"])
@pytest.mark.parametrize("looks", [True, False])
def test_a_gather_is_not_shared_over_a_write(how, looks):
    def body():
        mesh = init_device_mesh("cpu", (2,))
        plain = torch.arange(8.0).view(4, 2)
        parameter = nn.Parameter(distribute_tensor(plain, mesh, [Shard(0)]))
        view = parameter.detach().view(4, 2)
        writes = {
            "itself": parameter.detach,
            "data": lambda: parameter.data,
            "view": lambda: parameter.detach().view(2, 2, 2),
            "view alone": lambda: view,
            "local": lambda: parameter.to_local().detach(),
        }

        def gathered():
            return parameter.redistribute(placements=[Replicate()])

        for step in range(4):
            with lazy_tensor.lazy_mode():
                first = gathered()
                first.detach().mul_(0)  # it is the caller's own
                if looks and dist.get_rank() == 0:
                    lazy_tensor.flush()
                second = gathered()
                writes[how]().add_(1)
                if looks and dist.get_rank() == 1:
                    lazy_tensor.flush()
                third = gathered()
            assert torch.equal(whole(first), torch.zeros(4, 2))
            assert torch.equal(whole(second), plain + step)
            assert torch.equal(whole(third), plain + step + 1)

    run_on_ranks(2, body)


AT_ONCE = {
    "itself": lambda p: p.detach().mul_(2),
    "data": lambda p: p.data.mul_(2),
    "view": lambda p: p.detach().view(2, 2, 2).mul_(2),
    "local": lambda p: p.to_local().detach().mul_(2),
    "foreach": lambda p: torch._foreach_mul_([p.detach()], 2),
    "out": lambda p: torch.mul(p.detach(), 2, out=p.detach()),
}


@pytest.mark.parametrize("write", AT_ONCE.values(), ids=AT_ONCE)
@pytest.mark.parametrize("rank_at_once", [0, 1, None])
def test_a_gather_is_not_shared_over_a_write_that_runs_at_once(write, rank_at_once):
    """On one rank or on all: what is recorded is each rank's own choice, its collectives aren't."""

    def body():
        mesh = init_device_mesh("cpu", (2,))
        plain = torch.arange(8.0).view(4, 2)
        parameter = nn.Parameter(distribute_tensor(plain, mesh, [Shard(0)]))

        def gathered():
            return parameter.redistribute(placements=[Replicate()])

        for step in range(4):
            with lazy_tensor.lazy_mode():
                first = [gathered(), gathered()]
                if rank_at_once in (None, dist.get_rank()):
                    lazy_tensor.flush()
                    local.trace.policy.cold = 1 << 40
                write(parameter)
                local.trace.policy.cold = 0
                second = [gathered(), gathered()]
            for t in first:
                assert torch.equal(whole(t), plain * 2**step)
            for t in second:
                assert torch.equal(whole(t), plain * 2 ** (step + 1))

    run_on_ranks(2, body)


def test_a_gather_is_not_shared_over_a_write_that_no_trace_holds():
    def body():
        mesh = init_device_mesh("cpu", (2,))
        local = torch.zeros(2, 2)
        parameter = nn.Parameter(DTensor.from_local(local, mesh, [Shard(0)]))
        for step in range(4):
            gathered = [parameter.redistribute(placements=[Replicate()]) for _ in range(2)]
            assert all(torch.equal(whole(t), torch.full((4, 2), float(step))) for t in gathered)
            pending = parameter.detach() + 1
            # the caller's own tensor, outside the mode; at first a write that is recorded
            (local if step else parameter.detach()).add_(1)
            lazy_tensor.flush()
            assert not lazy_tensor.is_pending(pending)

    run_on_ranks(2, body)
