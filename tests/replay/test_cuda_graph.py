"""Plans as CUDA graphs, with a stand-in for these graphs on the CPU: memory that stays, inputs that
are copied in, results that are copied out. `test_on_a_gpu` is the same with real ones."""

import inspect

import pytest
import torch
from torch import nn

import lazy_tensor
from lazy_tensor import replay
from lazy_tensor.capture import cuda_graph

N = 12


class Graph:
    """Runs a function again into the memory of its first results, as a graph does."""

    made: list["Graph"] = []

    def __init__(self, run):
        self.run, self.n_runs = run, 0
        inputs = inspect.getclosurevars(run).nonlocals["self"]._inputs
        before = [tensor.clone() for tensor in inputs]
        self.results = run()
        for tensor, value in zip(inputs, before, strict=True):
            tensor.copy_(value)  # capturing computes nothing
        self.made.append(self)

    def replay(self):
        self.n_runs += 1
        for mine, new in zip(self.results, self.run(), strict=True):
            if mine.data_ptr() != new.data_ptr():
                mine.copy_(new)


def capture(run):
    graph = Graph(run)
    return graph.replay, graph.results


@pytest.fixture
def graphs(monkeypatch):
    """Where graphs are found that were captured on the CPU."""
    monkeypatch.setattr(cuda_graph, "DEVICE", "cpu")
    monkeypatch.setattr(cuda_graph, "capture_on_cuda", capture)
    monkeypatch.setattr(Graph, "made", [])
    return Graph.made


def trained(wrap, device="cpu"):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 6), nn.GELU(), nn.Linear(6, 4)).to(device)
    opt = torch.optim.AdamW(model.parameters(), fused=True)

    @wrap
    def step(x):
        opt.zero_grad()
        y = model(x)
        loss = (y - x).square().mean()
        loss.backward()
        opt.step()
        return loss.detach(), y.detach()[0], y.detach()

    kept = [step(torch.randn(3, 4, device=device)) for _ in range(N)]
    grads = [p.grad for p in model.parameters()]
    found = lazy_tensor.materialize([*kept, *model.parameters(), *grads])
    return [t.detach().cpu() for t in torch.utils._pytree.tree_leaves(found)], step


def eager():
    return trained(lambda step: step)[0]


def test_a_training_step_is_bit_equal_as_a_graph(graphs):
    found, step = trained(lambda f: replay(f, cuda_graphs=True, backend="aten"))
    for mine, theirs in zip(found, eager(), strict=True):
        assert torch.equal(mine, theirs)
    [graph] = graphs
    n_before = cuda_graph.RUNS_BEFORE
    assert graph.n_runs == step.n_replayed - n_before
    assert "as a CUDA graph" in step.summary()


def test_results_outlive_the_next_run(graphs):
    step = replay(lambda x: (x * 2, (x * 2)[0]), cuda_graphs=True, backend="aten")
    kept = [step(torch.full((2, 2), float(i))) for i in range(N)]
    assert graphs
    for i, (whole, row) in enumerate(kept):
        assert whole.tolist() == [[2.0 * i] * 2] * 2
        whole += 1
        assert row.tolist() == [2.0 * i] * 2


def test_results_that_share_memory_still_do(graphs):
    def both(x):
        y = x * 2
        return y, y[0]

    step = replay(both, cuda_graphs=True, backend="aten")
    for i in range(N):
        whole, row = step(torch.full((2, 2), float(i)))
        whole += 1
        assert row.tolist() == [2.0 * i + 1] * 2
    assert graphs


def test_what_is_written_and_moves_makes_a_new_graph_at_most_a_few_times(graphs):
    held = nn.Parameter(torch.zeros(3), requires_grad=False)

    def step(x):
        held.add_(x)
        return held * 1

    step = replay(step, cuda_graphs=True, backend="aten")
    for i in range(60):
        if i % 8 == 7:
            held.data = held.data.clone()
        assert step(torch.ones(3)).tolist() == [float(i + 1)] * 3
    assert len(graphs) <= cuda_graph.MOST_CAPTURES
    assert step.n_replayed > 20


def test_random_numbers_are_drawn_outside(graphs):
    def noisy(x):
        return torch.nn.functional.dropout(x, 0.5) + torch.rand(4)

    step = replay(noisy, cuda_graphs=True, backend="aten")
    torch.manual_seed(0)
    found = [step(torch.ones(4)).tolist() for _ in range(N)]
    torch.manual_seed(0)
    assert found == [noisy(torch.ones(4)).tolist() for _ in range(N)]
    assert graphs


def test_what_is_elsewhere_is_not_captured():
    step = replay(lambda x: x * 2, cuda_graphs=True, backend="aten")
    for _ in range(N):
        assert step(torch.ones(4)).tolist() == [2.0] * 4
    assert "no CUDA graph because a tensor is on cpu" in step.summary()
    assert step.n_replayed > 0


def test_a_capture_that_fails_runs_the_plan(graphs, monkeypatch):
    def fails(run):
        raise RuntimeError("operation not permitted when stream is capturing")

    monkeypatch.setattr(cuda_graph, "capture_on_cuda", fails)
    found, step = trained(lambda f: replay(f, cuda_graphs=True, backend="aten"))
    for mine, theirs in zip(found, eager(), strict=True):
        assert torch.equal(mine, theirs)
    assert "no CUDA graph because RuntimeError: operation not permitted" in step.summary()


@pytest.mark.gpu
def test_on_a_gpu():
    found, step = trained(lambda f: replay(f, cuda_graphs=True, backend="aten"), "cuda")
    expected, _ = trained(lambda f: f, "cuda")
    for mine, theirs in zip(found, expected, strict=True):
        assert torch.equal(mine, theirs)
    assert "as a CUDA graph" in step.summary()


def test_calls_whose_numbers_change_are_not_captured(graphs):
    parameter = torch.nn.Parameter(torch.zeros(3))
    parameter.grad = torch.ones(3)
    optimizer = torch.optim.SGD([parameter], lr=1.0)
    step, expected = replay(optimizer.step, cuda_graphs=True), torch.zeros(3)
    for i in range(16):
        optimizer.param_groups[0]["lr"] = 1 / (i + 1)
        step()
        expected -= 1 / (i + 1)
        assert torch.equal(lazy_tensor.materialize(parameter.detach()), expected)
    assert step.n_replayed > 8
    assert "no CUDA graph because numbers that it gets change" in step.summary()
