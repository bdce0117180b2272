"""Values computed again in backward: which, where, and with the same results."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from lazy_tensor import lazy_mode
from lazy_tensor.dispatch.plan import remat
from lazy_tensor.dispatch.plan.graph import graph_of
from lazy_tensor.dispatch.plan.remat import rematerialized
from lazy_tensor.dispatch.run import plan_cache
from lazy_tensor.dispatch.trie.trace import local

OFF = 0


class Block(nn.Module):
    """Norms, attention, dropout and a gated MLP around a residual stream."""

    def __init__(self, width=16):
        super().__init__()
        self.norms = nn.ModuleList([nn.LayerNorm(width), nn.RMSNorm(width)])
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.gate, self.up = nn.Linear(width, 4 * width), nn.Linear(width, 4 * width)
        self.down = nn.Linear(4 * width, width)

    def forward(self, x):
        q, k, v = (t.unsqueeze(1) for t in self.qkv(self.norms[0](x)).chunk(3, -1))
        x = x + self.out(F.scaled_dot_product_attention(q, k, v).squeeze(1))
        h = self.norms[1](x)
        return x + F.dropout(self.down(F.silu(self.gate(h)) * self.up(h)), 0.1)


def stack_of(depth):
    torch.manual_seed(0)
    return nn.Sequential(*[Block() for _ in range(depth)])


def train(depth, steps=3):
    model = stack_of(depth)
    optimizer = torch.optim.SGD(model.parameters(), 0.1, momentum=0.9)
    x = torch.randn(2, 8, 16)
    losses = []
    for _ in range(steps):
        optimizer.zero_grad()
        loss = model(x).square().mean()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses, [p.detach() for p in model.parameters()]


def kept(graph):
    """The values, of more than one element, that forward makes and backward reads."""
    read = {graph.root[s] for node in graph.nodes if node.in_backward for s in node.reads}
    made = {s for s in read if s in graph.producer and not graph.producer[s].in_backward}
    return {slot for slot in made if graph.spec[slot].size}


def recorded(step):
    with lazy_mode():
        held = step()
        live = tuple(t._value.slot.index for t in held)
        return graph_of(local.trace.pending().state.steps(), live)


def gradient_of(function, *inputs):
    """A step that hands back the gradients of `function(...).sum()`, which alone stay alive."""
    leaves = [x.requires_grad_() for x in inputs]
    return lambda: torch.autograd.grad(function(*leaves).sum(), leaves)


def assert_is_eagers(run, interval):
    """`run()` gives eager's tensors: when it is interpreted, planned, and planned already."""
    expected = run()
    for _ in range(3):
        with lazy_mode(remat_interval=interval):
            got = run()
        for a, b in zip(got, expected, strict=True):
            assert torch.equal(a, b)


@pytest.mark.parametrize("interval", [1, 2, 5])
def test_training_is_the_same_bit_for_bit(interval):
    expected_losses, expected = train(3)
    with lazy_mode(remat_interval=interval):
        losses, parameters = train(3)
    assert losses == expected_losses
    for mine, theirs in zip(parameters, expected, strict=True):
        assert torch.equal(mine, theirs)


def test_plans_take_less_memory_the_more_may_be_repeated(monkeypatch):
    peaks = []
    build_plan = plan_cache.build_plan

    def noted(*args):
        plan = build_plan(*args)
        peaks.append(plan.peak_bytes)
        return plan

    monkeypatch.setattr(plan_cache, "build_plan", noted)
    model, x = stack_of(6), torch.randn(2, 64, 16)

    def planned_peak(interval):
        peaks.clear()
        for _ in range(3):
            model.zero_grad()
            with lazy_mode(remat_interval=interval, record="always"):
                model(x).square().mean().backward()
        return peaks[-1]

    off, one, two = (planned_peak(interval) for interval in (OFF, 1, 2))
    assert two < one < 0.9 * off


def test_a_chain_is_cut_after_as_many_saved_values_as_the_interval():
    def powers(x):
        for _ in range(12):
            x = x.sin()  # its gradient needs what it was given
        return x

    graph = recorded(gradient_of(powers, torch.randn(64, 64)))
    assert len(kept(graph)) == 11
    for interval, n_kept in ((1, 5), (2, 3), (3, 2), (11, 0)):
        assert len(kept(rematerialized(graph, interval))) == n_kept


def test_what_a_cheap_call_was_given_is_not_kept_in_its_place():
    def step(x, w):
        return torch.tanh(x @ w) @ w

    graph = recorded(gradient_of(step, torch.randn(32, 32), torch.randn(32, 32)))
    assert rematerialized(graph, 4) is graph  # the product would be kept instead of its tanh


def test_no_value_is_repeated_from_memory_that_was_written():
    def step(x, scale):
        y = x * 1.5
        z = y.sin() * y  # saves y, sin(y)
        with torch.no_grad():
            scale.add_(1)
        return z * (scale * 2)

    x = torch.randn(16, 16)

    def run():
        scale = torch.ones(16, 16)
        leaf = x.clone().requires_grad_()
        step(leaf, scale).sum().backward()
        return leaf.grad, scale

    assert_is_eagers(run, interval=4)


def test_a_value_from_a_leaf_that_is_written_before_backward_is_kept():
    x, noise = torch.randn(16, 16), torch.randn(16, 16)

    def step():
        leaf = x.requires_grad_()
        scaled = noise * 2
        loss = (leaf * scaled).sum()
        noise.zero_()
        return torch.autograd.grad(loss, leaf)

    graph = recorded(step)
    assert kept(graph)
    assert rematerialized(graph, 4) is graph


def test_random_numbers_are_not_drawn_again():
    x = torch.randn(16, 16)

    def run():
        torch.manual_seed(3)
        leaf = x.clone().requires_grad_()
        F.dropout(leaf.sin() * torch.rand_like(leaf), 0.5).cos().sum().backward()
        return leaf.grad, torch.rand(1)

    assert_is_eagers(run, interval=8)


def test_deeper_models_compile_no_more_kernels(counting):
    x = torch.randn(2, 8, 16)

    def n_kernels(depth):
        model = stack_of(depth).eval()
        for _ in range(3):
            model.zero_grad()
            with lazy_mode(remat_interval=2):
                model(x).square().mean().backward()
        return len(counting.segments)

    n_kernels(4)
    n = n_kernels(6)
    assert n_kernels(12) == n


def test_running_statistics_are_updated_once(monkeypatch):
    monkeypatch.setattr(remat, "LEAST_BYTES", 1)

    def statistics():
        torch.manual_seed(0)
        model = nn.Sequential(nn.Conv2d(2, 4, 3), nn.BatchNorm2d(4), nn.SiLU(), nn.Conv2d(4, 2, 3))
        for _ in range(3):
            model(torch.randn(2, 2, 8, 8)).square().sum().backward()
        return [*model.buffers(), *(p.grad for p in model.parameters())]

    assert_is_eagers(statistics, interval=4)
