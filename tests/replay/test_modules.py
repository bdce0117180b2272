"""`replay(model)`: calls of a module run plans, forward and backward; all else is the program's."""

import copy
import dataclasses
import gc
import io
import itertools
import os
import pickle
import threading
import weakref
from collections import UserDict
from functools import partial
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

import lazy_tensor
from lazy_tensor import lazy_mode, replay, unwrap, wrap
from lazy_tensor.capture.replay_module import ReplayedModule
from lazy_tensor.dispatch import torch_private


def calls_of(model: nn.Module) -> ReplayedModule:
    made: Any = model._compiled_call_impl
    assert isinstance(made, ReplayedModule)
    return made


def backwards_of(model: nn.Module) -> int:
    """How many backwards were replayed."""
    found = [one for kind in calls_of(model).forward._signatures.values() for one in kind.captured]
    return sum(one.companion.n_replayed for one in found if one.companion is not None)


class Block(nn.Module):
    def __init__(self, width=8, p=0.1):
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.wide = nn.Linear(width, 3 * width)
        self.narrow = nn.Linear(3 * width, width)
        self.dropout = nn.Dropout(p)

    def forward(self, x):
        return x + self.dropout(self.narrow(F.gelu(self.wide(self.norm(x)))))


class Writing(nn.Module):
    """Writes to views of what it computed."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(6, 6)

    def forward(self, x):
        x = self.linear(x)
        x[:, 1:3] *= 2
        x[:, 0].add_(x[:, 5])
        return x.relu()


class Image(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv = nn.Conv2d(1, 3, 3)
        self.norm = nn.BatchNorm2d(3)
        self.out = nn.Linear(3, 2)

    def forward(self, x):
        x = F.relu(self.norm(self.conv(x.view(-1, 1, 4, 2).repeat(1, 1, 1, 2))))
        return self.out(x.mean((2, 3)))


def batches(n=10, size=4):
    generator = torch.Generator().manual_seed(0)
    return [torch.randn(size, 8, generator=generator) for _ in range(n)]


def trained(model, *, n=10, after=lambda i, model: None, loss_of=None, sizes=None):
    """The losses, gradients and state of a run of training."""
    torch.manual_seed(1)
    optimizer = torch.optim.AdamW(model.parameters(), 1e-2)
    found = []
    for i, x in enumerate(batches(n)):
        optimizer.zero_grad()
        if sizes is not None:
            x = x[: sizes[i % len(sizes)]]
        loss = model(x).square().mean() if loss_of is None else loss_of(model, x, i)
        loss.backward()
        found.append(loss.detach().clone())
        found += [None if p.grad is None else p.grad.clone() for p in model.parameters()]
        optimizer.step()
        after(i, model)
    return [*found, *[value.clone() for value in model.state_dict().values()]]


def assert_same(got, expected, tolerance=0.0):
    assert len(got) == len(expected)
    for one, other in zip(got, expected, strict=True):
        if isinstance(other, torch.Tensor):
            one = lazy_tensor.materialize(one)
            torch.testing.assert_close(one, other, rtol=tolerance, atol=tolerance)
        else:
            assert one == other


KERNELS: dict[str, Any] = {"compile": "blocking", "backend": "inductor"}


def both(make, run, *, n_replayed=1, tolerance=0.0, **options):
    """Run with a module and with one that is replayed; both do the same."""
    torch.manual_seed(0)
    model = make()
    twin = replay(copy.deepcopy(model), **{"compile": "off", **options})
    torch.manual_seed(1)
    expected, state = run(model), torch.random.get_rng_state()
    torch.manual_seed(1)
    assert_same(run(twin), expected, tolerance)
    assert torch.equal(torch.random.get_rng_state(), state)
    assert calls_of(twin).forward.n_replayed >= n_replayed
    return twin


def blocks():
    return nn.Sequential(Block(), Block(), nn.Linear(8, 4))


class Unrolled(nn.Module):
    def __init__(self):
        super().__init__()
        self.cell = nn.GRUCell(2, 5)

    def forward(self, x):
        h = None
        for part in x.split(2, dim=1):
            h = self.cell(part, h)
        return h


@pytest.mark.parametrize("make", [blocks, Image, Unrolled])
def test_training_is_eagers_bit_for_bit(make):
    twin = both(make, trained, n_replayed=5)
    assert backwards_of(twin) >= 3
    assert all(type(p.grad) is torch.Tensor for p in twin.parameters())


def test_it_is_the_same_module():
    model = blocks()
    assert replay(model) is model
    trained(model)
    for twin in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        assert twin._compiled_call_impl is None
        assert torch.equal(twin(batches()[0].clone()).detach() * 0, torch.zeros(4, 4))
    file = io.BytesIO()
    torch.save(model.state_dict(), file)
    assert list(model.state_dict()) == list(blocks().state_dict())


def test_unwrap_ends_it():
    model = replay(blocks(), compile="off")
    replay(model[0], compile="off")
    trained(model)
    n_replayed = calls_of(model).forward.n_replayed
    calls = calls_of(model)
    assert unwrap(model) is model
    trained(model)
    assert calls.forward.n_replayed == n_replayed
    assert not [part for part in model.modules() if part._compiled_call_impl is not None]


def test_training_and_evaluation_alternate():
    def run(model):
        found = []

        def after(i, model):
            model.eval()
            with torch.no_grad():
                found.append(model(batches(12)[i]))
            with torch.inference_mode():
                found.append(model(batches(12)[i]).clone())
            model.train()

        return [*trained(model, n=12, after=after), *found]

    both(Image, run)


def test_gradients_of_inputs():
    def run(model):
        found = []
        for x in batches(8):
            x.requires_grad_()
            model(torch.tanh(x) * 2).sum().backward()
            found.append(x.grad)
        return found

    both(blocks, run)


class Product(nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.tensor([0.5, -1.5]))

    def forward(self, a, b):
        return a * self.weight + b * b


DEPENDENT = {
    "an argument": lambda model, x: model(x, 2 * x),
    "a view of one": lambda model, x: model(x, x.view(2, 1).view(2)),
    "its own output": lambda model, x: model(model(x, x.detach()), x.detach()),
    "its parameter": lambda model, x: model(x.detach(), x * model.weight),
}


@pytest.mark.filterwarnings("ignore:replay.Product. goes on recording")
@pytest.mark.parametrize("call", DEPENDENT.values(), ids=DEPENDENT)
def test_arguments_that_depend_on_each_other_or_on_the_parameters(call):
    """Autograd runs the graph behind an argument once, not for the module and again outside."""

    def run(model):
        found = []
        for i in range(20):
            x = torch.tensor([1.0, i]).requires_grad_()
            model.zero_grad()
            call(model, x).sum().backward()
            found += [x.grad, model.weight.grad]
        return found

    both(Product, run, n_replayed=0)


def test_several_forwards_before_a_backward():
    def loss_of(model, x, i):
        outs = [model(x + k) for k in range(1 + i % 3)]
        return sum(out.square().mean() for out in outs)

    both(blocks, lambda model: trained(model, loss_of=loss_of, n=14), n_replayed=8)


def test_a_graph_that_is_kept_and_run_twice():
    def run(model):
        found = []
        for x in batches(8):
            model.zero_grad()
            loss = model(x).square().mean()
            loss.backward(retain_graph=True)
            loss.backward()
            found += [p.grad for p in model.parameters()]
        return found

    both(blocks, run)


class Two(nn.Module):
    def __init__(self):
        super().__init__()
        self.body = Block(p=0.3)
        self.a, self.b = nn.Linear(8, 2), nn.Linear(8, 3)

    def forward(self, x, *, scale=1.0):
        x = self.body(x)
        return {"a": self.a(x), "both": [self.b(x) * scale, x.argmax(-1)], "none": None}


@pytest.mark.parametrize("used", [["a"], ["b"], ["a", "b"], ["a", "b", "ab"]])
def test_outputs_of_which_some_are_used(used):
    """Also backward of another kind after a forward that was replayed: its graph is made then."""

    def loss_of(model, x, i):
        out = model(x, scale=0.5)
        which = used[i * len(used) // 12]
        return sum(t.square().mean() for t in (
            ([out["a"]] if "a" in which else []) + ([out["both"][0]] if "b" in which else [])
        ))  # fmt: skip

    both(Two, lambda model: trained(model, loss_of=loss_of, n=12))


@dataclasses.dataclass
class Output:
    logits: torch.Tensor
    note: str = "fine"


class Cache:
    def __init__(self, keys):
        self.layers = [UserDict(keys=keys)]
        self.n_seen = 3


class Giving(nn.Module):
    def __init__(self):
        super().__init__()
        self.body = nn.Linear(8, 4)

    def forward(self, x):
        out = self.body(x)
        return (Output(out), Cache(out * 2))


def test_objects_among_the_outputs():
    def loss_of(model, x, _):
        output, cache = model(x)
        assert type(output) is Output
        assert output.note == "fine"
        assert cache.n_seen == 3
        return output.logits.mean() + cache.layers[0]["keys"].square().mean()

    both(Giving, lambda model: trained(model, loss_of=loss_of))


def test_sizes_that_alternate():
    both(blocks, lambda model: trained(model, n=16, sizes=[4, 4, 4, 2]))


def test_parameters_that_are_frozen_and_thawed():
    def after(i, model):
        model[0].requires_grad_(i % 16 < 8)

    both(blocks, lambda model: trained(model, n=40, after=after), n_replayed=8)


def test_unused_and_tied_parameters():
    class Tied(nn.Module):
        def __init__(self):
            super().__init__()
            self.a, self.b, self.unused = nn.Linear(8, 8), nn.Linear(8, 8), nn.Linear(2, 2)
            self.b.weight = self.a.weight

        def forward(self, x):
            return self.b(torch.relu(self.a(x)))

    both(Tied, trained)


def halve(parameter):
    parameter.grad.mul_(0.5)


def test_hooks():
    def run(model):
        handles = [
            model.register_forward_hook(lambda module, args, out: out * 2),
            model[0].register_forward_pre_hook(lambda module, args: (args[0] + 1,)),
            model[1].register_full_backward_hook(lambda module, given, out: (given[0] * 2,)),
            model[0].wide.bias.register_post_accumulate_grad_hook(halve),
        ]  # fmt: skip
        found = trained(model)
        for handle in handles:
            handle.remove()
        return [*found, *trained(model)]

    both(blocks, run)


def test_what_a_call_was_given_is_freed_after_backward():
    model = replay(blocks(), compile="off")
    losses, inputs = [], []

    def step():
        x = torch.randn(4, 8)
        loss = model(x).square().mean()
        loss.backward()
        return loss, weakref.ref(x)

    for _ in range(10):
        loss, given = step()
        losses.append(loss)
        inputs.append(given)
    gc.collect()
    assert [given() for given in inputs[-3:]] == [None] * 3


@pytest.mark.filterwarnings("ignore:replay.*goes on recording")
def test_an_output_that_is_a_new_leaf_gets_its_gradient():
    class Leaf(nn.Linear):
        def forward(self, x):
            y = super().forward(x)
            return y, y.detach().clone().requires_grad_()

    model = replay(Leaf(4, 4))
    for _ in range(12):
        y, leaf = model(torch.ones(3, 4))
        (y.sum() + leaf.pow(2).sum()).backward()
        assert leaf.is_leaf
        assert torch.equal(lazy_tensor.materialize(leaf.grad), 2 * lazy_tensor.materialize(leaf))
    assert "a leaf that requires a gradient" in calls_of(model).forward.obstacle


@pytest.mark.filterwarnings("ignore:replay.*goes on recording")
def test_hooks_for_gradients_run_once():
    def run(model):
        handle = model[0].wide.weight.register_hook(lambda grad: grad * 3)
        found = trained(model, n=14)
        handle.remove()
        return found

    both(blocks, run, n_replayed=0)


def test_replicas_compute_with_their_own_parameters():
    model = replay(nn.Linear(8, 2), compile="off")
    for x in batches(8):
        model(x).sum().backward()
    replica = model._replicate_for_data_parallel()
    replica.weight = torch.zeros(2, 8)
    replica.bias = torch.ones(2)
    assert torch.equal(replica(batches()[0]), torch.ones(4, 2))
    assert model._compiled_call_impl is not None


@pytest.mark.filterwarnings("ignore:.*torch.jit.trace:DeprecationWarning")
def test_tracing():
    model = replay(nn.Linear(8, 2), compile="off")
    for x in batches(8):
        model(x).sum().backward()
    traced = torch.jit.trace(model, batches()[0])
    assert torch.equal(traced(batches()[1]), model(batches()[1]))


def test_checkpointing_around_it():
    def loss_of(model, x, _):
        return checkpoint(model, x, use_reentrant=False).square().mean()

    both(blocks, lambda model: trained(model, loss_of=loss_of))


class Checkpointed(nn.Module):
    def __init__(self, p=0.0, use_reentrant=False):
        super().__init__()
        self.first, self.second = Block(p=p), Block(p=p)
        self.use_reentrant = use_reentrant

    def forward(self, x):
        x = self.first(x)
        return self.second(checkpoint(self.second, x, use_reentrant=self.use_reentrant))


@pytest.mark.filterwarnings("ignore:replay.*goes on recording")
@pytest.mark.parametrize("p", [0.0, 0.2])
def test_checkpointing_inside_it(p):
    both(lambda: Checkpointed(p), lambda model: trained(model, n=14), n_replayed=0)


def test_reentrant_checkpointing_inside_it_is_refused():
    model = replay(Checkpointed(use_reentrant=True))
    with pytest.raises(RuntimeError, match="use_reentrant=False"):
        model(batches()[0]).sum().backward()


def test_autocast():
    def loss_of(model, x, _):
        with torch.autocast("cpu", torch.bfloat16):
            out = model(x)
        return out.float().square().mean()

    both(blocks, lambda model: trained(model, loss_of=loss_of))


def test_parts_of_a_model():
    def make():
        return nn.Sequential(Block(), nn.Linear(8, 8), Block())

    torch.manual_seed(0)
    model = make()
    twin = copy.deepcopy(model)
    for part in twin:
        replay(part, compile="off")
    expected = trained(model)
    assert_same(trained(twin), expected)
    assert backwards_of(twin[2])


def test_a_replayed_step_of_a_replayed_module():
    model = replay(seeded(blocks), compile="off")
    optimizer = torch.optim.SGD(model.parameters(), 0.1)

    @replay(compile="off")
    def step(x):
        optimizer.zero_grad()
        loss = model(x).square().mean()
        loss.backward()
        optimizer.step()
        return loss.detach()

    twin = seeded(blocks)
    other = torch.optim.SGD(twin.parameters(), 0.1)
    for i, x in enumerate(batches(12)):
        torch.manual_seed(i)
        loss = step(x)
        torch.manual_seed(i)
        other.zero_grad()
        expected = twin(x).square().mean()
        expected.backward()
        other.step()
        assert torch.equal(lazy_tensor.materialize(loss), expected.detach())
    assert step.n_replayed > 5


def test_transforms_of_functions():
    linear = nn.Linear(8, 4)
    twin = replay(copy.deepcopy(linear), compile="off")
    x = batches()[0]

    def loss_of(parameters, module):
        return torch.func.functional_call(module, parameters, (x,)).square().mean()

    for _ in range(6):
        twin(x).sum().backward()
        got = torch.func.grad(loss_of)(dict(twin.named_parameters()), twin)
        expected = torch.func.grad(loss_of)(dict(linear.named_parameters()), linear)
        assert_same([*got.values()], [*expected.values()])
        rows = torch.func.vmap(twin)(x[:, None])
        assert_same([rows], [torch.func.vmap(linear)(x[:, None])])


def test_a_loop_in_lazy_mode_and_a_wrapped_module():
    expected = trained(seeded(blocks))
    with lazy_mode(compile="off"):
        assert_same(trained(replay(seeded(blocks), compile="off")), expected)
    assert_same(trained(wrap(replay(seeded(blocks), compile="off"))), expected)


def seeded(make):
    torch.manual_seed(0)
    return make()


def test_the_optimizers_step():
    expected = trained(seeded(blocks))
    model = replay(seeded(blocks), compile="off")
    torch.manual_seed(1)
    optimizer = torch.optim.AdamW(model.parameters(), 1e-2)
    step, found = replay(optimizer.step, compile="off"), []
    for x in batches():
        optimizer.zero_grad()
        loss = model(x).square().mean()
        loss.backward()
        found.append(loss.detach().clone())
        found += [p.grad.clone() for p in model.parameters()]
        step()
    assert_same([*found, *model.state_dict().values()], expected)
    assert step.n_replayed


class Sharing(nn.Module):
    """Returns outputs that share memory, by `give`, and what it keeps."""

    def __init__(self, give):
        super().__init__()
        self.linear = nn.Linear(8, 4)
        self.give = give
        self.kept = {"scale": 2.0}
        self.record = Record(3)

    def forward(self, x):
        return self.give(self, self.linear(x) * self.kept["scale"])


@dataclasses.dataclass
class Record:
    n: int


SHARING: dict[str, Any] = {
    "twice": lambda m, y: (y, y),
    "view": lambda m, y: (y, y.view(-1)),
    "base of a view": lambda m, y: (y.view(-1), y),
    "views": lambda m, y: {"a": y[:2], "b": y[:, 1:], "c": y.t()},
    "view twice": lambda m, y: (v := y[1:], v, y),
}


@pytest.mark.parametrize("written", [0, 1])
@pytest.mark.parametrize("give", SHARING)
def test_a_write_to_one_of_the_outputs_shows_in_those_that_share_its_memory(give, written):
    def run(model):
        found = []
        for x in batches():
            x.requires_grad_()
            model.zero_grad()
            outputs = model(x)
            outputs = list(outputs.values() if isinstance(outputs, dict) else outputs)
            found.append([i for i, one in enumerate(outputs) if one is outputs[0]])
            outputs[written].mul_(3)
            sum((one * (i + 1)).sum() for i, one in enumerate(outputs)).backward()
            found += [one.detach().clone() for one in outputs]
            found += [x.grad, model.linear.weight.grad.clone()]
        return found

    both(lambda: Sharing(SHARING[give]), run, n_replayed=3)


def test_what_a_module_keeps_is_returned_itself():
    kept = Sharing(lambda m, y: (y, m.kept, m.record))
    replay(kept, compile="off")
    for x in batches():
        y, scales, record = kept(x)
        y.sum().backward()
        assert scales is kept.kept
        assert record is kept.record
    assert calls_of(kept).forward.n_replayed > 0


@pytest.mark.filterwarnings("ignore:replay.* goes on recording")
def test_an_argument_that_is_returned_is_the_same_object():
    class Passing(nn.Module):
        def forward(self, x, record):
            return x * 2, record

    model, record = replay(Passing(), compile="off"), Record(3)
    assert all(model(x, record)[1] is record for x in batches())


def test_outputs_may_be_written():
    def loss_of(model, x, _):
        return F.relu(model(x), inplace=True).square().mean()

    both(blocks, lambda model: trained(model, loss_of=loss_of))
    softmax = replay(nn.Sequential(nn.Softmax(1), nn.Unflatten(1, (2, 4))), compile="off")
    for x in batches(8):
        out = softmax(x.requires_grad_())
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            out.mul_(2).sum().backward()  # what softmax gave is needed


def test_what_is_saved_may_not_be_written():
    linear = nn.Linear(8, 8)
    model = replay(nn.Sequential(linear, nn.Sigmoid()), compile="off")
    for i in range(6):
        out = model(batches()[i])
        with torch.no_grad():
            linear.weight.add_(0.0)
        x = batches()[i].requires_grad_()
        other = model(x)
        with torch.no_grad():
            linear.weight.add_(0.0)
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            other.sum().backward()
        del out


@pytest.mark.filterwarnings("ignore:replay.*goes on recording")
def test_what_is_saved_may_not_be_written_in_graphs_that_are_returned():
    """A hook for a gradient keeps one node from standing for the graph."""
    linear = nn.Linear(8, 8)
    linear.weight.register_hook(lambda gradient: gradient)
    model = replay(nn.Sequential(linear, nn.BatchNorm1d(8), nn.Sigmoid()), compile="off")
    for x in batches(12):
        model(x.requires_grad_()).sum().backward()
        out = model(x)
        with torch.no_grad():
            linear.weight.add_(0.0)
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            out.sum().backward()


def test_what_is_saved_may_not_be_written_before_gradients_of_gradients():
    linear = nn.Linear(8, 8)
    model = replay(nn.Sequential(linear, nn.Sigmoid()), compile="off")
    for x in batches(8):
        out = model(x.requires_grad_()).sum()
        (gradient,) = torch.autograd.grad(out, x, create_graph=True)
        with torch.no_grad():
            linear.weight.add_(0.0)
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            gradient.sum().backward()


def test_gradients_with_a_graph_run_forward_once_more(monkeypatch):
    model, n_forwards = replay(blocks(), compile="off"), 0
    for x in batches(12):
        model(x).sum().backward()
    call_module = torch_private.call_module

    def counted(*args):
        nonlocal n_forwards
        n_forwards += 1
        return call_module(*args)

    n_replayed = calls_of(model).forward.n_replayed
    out = model(x)
    assert calls_of(model).forward.n_replayed == n_replayed + 1
    monkeypatch.setattr(torch_private, "call_module", counted)
    torch.autograd.grad(out.sum(), list(model.parameters()), create_graph=True)
    assert n_forwards == 1


@pytest.mark.parametrize(("p", "options"), [(0.0, {}), (0.3, {}), (0.0, KERNELS)])
def test_gradients_of_gradients(p, options):
    """As WGAN-GP's critic has them."""

    def loss_of(model, x, _):
        x = x.clone().requires_grad_()
        out = model(x * 1)
        (gradient,) = torch.autograd.grad(out.sum(), x, create_graph=True)
        return out.mean() + (gradient.norm(dim=1) - 1).square().mean()

    def make():
        parts = nn.Linear(8, 64), nn.Softplus(), nn.Tanh(), nn.Dropout(p), nn.Linear(64, 1)
        return nn.Sequential(*parts)

    # the sums of what reaches a parameter by two ways are in another order
    run = partial(trained, loss_of=loss_of, n=16)
    both(make, run, tolerance=1e-4 if options else 1e-5, **options)


class Branches(nn.Module):
    """Two outputs, of which each has a graph of its own."""

    def __init__(self):
        super().__init__()
        self.wide = nn.Linear(8, 64)
        self.one = Block(64)
        self.other = Block(64, p=0.0)

    def forward(self, x):
        x = F.softplus(self.wide(x)).tanh()
        return self.one(x).exp().mean(), self.other(x).exp().mean()


@pytest.mark.parametrize("options", [{}, KERNELS])
def test_backward_from_outputs_not_used_before(options):
    """Forward runs again for it, by ops one by one: a kernel's results differ by rounding."""

    def run(model):
        return trained(model, loss_of=lambda model, x, i: model(x)[i >= 12], n=24)

    both(Branches, run, tolerance=1e-3 if options else 0.0, **options)


class Drifting(nn.Module):
    """What it does is another thing with each call."""

    scale: torch.Tensor

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(8, 4)
        self.register_buffer("scale", torch.ones(4))

    def forward(self, x):
        self.scale.mul_(1.5)
        return (self.linear(x) * self.scale.clone()).tanh()


def test_backward_learns_from_the_graphs_of_its_own_forwards():
    """A forward that runs again later would save other values."""
    both(Drifting, lambda model: trained(model, n=14))
    model = replay(Drifting(), compile="off")
    for i, x in enumerate(batches(12)):
        model.zero_grad()
        out = model(x)
        if i == 11:
            with pytest.raises(RuntimeError, match="has to be recorded"):
                torch.autograd.grad(out.sum(), list(model.parameters()), create_graph=True)
        else:
            out.sum().backward()


class Aside(nn.Module):
    """It computes with tensors that are none of its arguments and parameters."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(8, 8)
        self.others = [nn.Linear(8, 8)]
        self.scale: torch.Tensor | None = None

    def forward(self, x):
        x = self.others[0](self.linear(x))
        return x if self.scale is None else x * self.scale


@pytest.mark.parametrize("kind", ["a module in a list", "an attribute with a graph"])
@pytest.mark.filterwarnings("ignore:replay.*goes on recording")
def test_gradients_reach_what_is_no_argument_and_no_parameter(kind):
    def run(model):
        leaf = torch.ones(8, requires_grad=True)
        found = []
        for x in batches(14):
            if kind == "an attribute with a graph":
                model.scale = leaf * 2
            model.zero_grad()
            x.requires_grad_()
            model(x * 1).square().mean().backward()
            found += [leaf.grad, x.grad, model.others[0].weight.grad.clone()]
        return [one if one is None else one.clone() for one in found]

    both(Aside, run, n_replayed=0, tolerance=1e-6)


class Reading(nn.Module):
    def __init__(self):
        super().__init__()
        self.body = nn.Linear(8, 4)

    def forward(self, x):
        out = self.body(x)
        return out * 2 if float(out.detach().sum()) > 0 else out


def test_a_module_that_never_settles_runs_as_in_eager():
    model = seeded(Reading)
    expected = trained(copy.deepcopy(model), n=30)
    twin = replay(model, compile="off")
    with pytest.warns(UserWarning, match="goes on recording"):
        assert_same(trained(twin, n=30), expected)
    calls = calls_of(twin)
    assert calls.forward.n_replayed == 0
    assert calls.forward.n_recorded + calls.backward.n_recorded < 30


def test_an_exception_in_forward_passes():
    class Raising(nn.Module):
        def __init__(self):
            super().__init__()
            self.body, self.limit = nn.Linear(8, 4), 10.0

        def forward(self, x):
            if x.shape[0] == 3:
                raise ValueError("three")
            return self.body(x)

    model = replay(Raising(), compile="off")
    for x in itertools.chain(batches(6), [torch.ones(3, 8)], batches(3)):
        if x.shape[0] == 3:
            with pytest.raises(ValueError, match="three"):
                model(x)
        else:
            model(x).sum().backward()
    assert calls_of(model).forward.n_replayed


def test_an_exception_while_a_call_is_checked_loses_no_plan(monkeypatch):
    class Raising(nn.Module):
        def __init__(self):
            super().__init__()
            self.body = nn.Linear(8, 4)

        def forward(self, x):
            if "HIDDEN" in os.environ:  # which nothing watches
                raise ValueError("hidden")
            return self.body(x)

    model = replay(Raising(), compile="off", check_every=1)
    forward = calls_of(model).forward
    for x in batches(16):
        model(x).sum().backward()
    captured, n_backwards = forward.captured(), backwards_of(model)
    assert n_backwards

    def is_checked():
        for x in batches(2):
            model(x)

    with monkeypatch.context() as environment:
        environment.setenv("HIDDEN", "1")
        with pytest.raises(ValueError, match="hidden"):
            is_checked()
    for x in batches(4):
        model(x).sum().backward()
    assert forward.captured() == captured
    assert backwards_of(model) >= n_backwards + 2


def test_forward_may_wait_for_a_thread_that_calls_the_module():
    """While backward is learnt, too, for which forwards are recorded that could be replayed."""

    class Waiting(nn.Module):
        def __init__(self):
            super().__init__()
            self.body = nn.Linear(8, 4)

        def forward(self, x, waits=True):
            if waits:
                thread = threading.Thread(target=self, args=(x, False))
                thread.start()
                thread.join(20)
                if thread.is_alive():
                    raise TimeoutError("the other call waits for this one")
            return self.body(x)

    model = replay(Waiting(), compile="off")
    for x in batches(16):
        model(x).sum().backward()
    assert calls_of(model).forward.n_replayed
    assert backwards_of(model)


@pytest.mark.filterwarnings("ignore:replay.*goes on recording")
def test_what_a_module_returned_is_let_go():
    class Sharing(nn.Module):
        def __init__(self):
            super().__init__()
            self.body = nn.Linear(8, 4)

        def forward(self, x):
            output: Any = type("Output", (), {})()
            output.value = self.body(x)
            return output

    model = replay(Sharing(), compile="off")
    classes = [weakref.ref(type(model(x))) for x in batches(16)]
    assert calls_of(model).forward.n_recorded
    del model
    gc.collect()
    assert not [one for one in classes if one() is not None]


@pytest.mark.filterwarnings("ignore:replay.*goes on recording")
def test_an_output_that_is_an_input_or_a_parameter():
    class Sharing(nn.Module):
        def __init__(self):
            super().__init__()
            self.weight = nn.Parameter(torch.ones(8))

        def forward(self, x):
            return x, self.weight, x * self.weight

    def run(model):
        found = []
        for x in batches(8):
            y = x.clone().requires_grad_()
            same, weight, product = model(y * 1)
            (same.sum() * 2 + weight.square().sum() + product.sum()).backward()
            found += [y.grad, model.weight.grad.clone()]
        return found

    both(Sharing, run, n_replayed=0)


def test_a_graph_that_the_module_keeps_is_run_as_in_eager():
    class Keeping(nn.Module):
        def __init__(self):
            super().__init__()
            self.linear = nn.Linear(8, 8)

        def forward(self, x):
            self.hidden = torch.tanh(self.linear(x))
            return self.hidden.sin()

    def loss_of(model, x, _):
        out = model(x)
        return out.square().mean() + model.hidden.abs().mean()

    model = seeded(Keeping)
    twin = replay(copy.deepcopy(model), compile="off")
    with pytest.warns(UserWarning, match="goes on recording"):
        got = trained(twin, loss_of=loss_of, n=14)
    assert_same(got, trained(model, loss_of=loss_of, n=14), tolerance=1e-5)


def test_a_module_is_checked_in_another_thread_and_at_another_line():
    model = replay(blocks(), compile="off", check_every=1)
    raised: list[BaseException] = []
    for x in batches(6):
        model(x).sum().backward()

    def elsewhere():
        try:
            for x in batches(6):
                model(x).sum().backward()
        except RuntimeError as error:
            raised.append(error)

    thread = threading.Thread(target=elsewhere)
    thread.start()
    thread.join()
    assert not raised
    assert model._compiled_call_impl.forward.n_replayed


def test_results_belong_to_the_graph_as_eagers_do():
    expected = nn.Sequential(nn.Linear(8, 4), nn.Tanh(), nn.Linear(4, 2))
    model = replay(copy.deepcopy(expected), compile="off")
    for x in batches(8):
        model(x).sum().backward()
    for one in (expected, model):
        one.zero_grad()
        out = one(x)
        assert not out._is_view()
        out.retain_grad()
        out.register_hook(lambda gradient: gradient * 2)
        loss = out.sum()
        loss.backward(retain_graph=True)
        loss.backward()
        with pytest.raises(RuntimeError, match="backward through the graph a second time"):
            loss.backward()
        one(x)[0].mul_(3).sum().backward()
        one(x).detach_()
    assert_same([p.grad for p in model.parameters()], [p.grad for p in expected.parameters()])
    assert model(x).grad_fn.name() == "ReplayBackward"


def test_a_forward_that_was_bypassed_has_the_graph_of_one_that_was_recorded(by_chance):
    """A recorded backward can then be compared with a replayed one."""
    model = Writing()
    eager = copy.deepcopy(model)
    replay(model, compile="off", check_every=8)
    x = torch.randn(4, 6)
    for _ in range(100):
        for one in (model, eager):
            one.zero_grad()
            one(x).sum().backward()
        torch.testing.assert_close(model.linear.weight.grad, eager.linear.weight.grad)
    assert backwards_of(model)


def test_gradients_of_several_batches_are_added_up():
    """There is a plan where gradients are `None`, and one where there are some: each is learnt."""
    model = Block()
    eager = copy.deepcopy(model)
    replay(model)
    for i in range(24):
        for one in (model, eager):
            torch.manual_seed(i)
            if i % 2 == 0:
                one.zero_grad()
            one(torch.randn(4, 8)).square().mean().backward()
        for p, q in zip(model.parameters(), eager.parameters(), strict=True):
            torch.testing.assert_close(p.grad, q.grad, rtol=0, atol=0)
    assert calls_of(model).forward.n_replayed > 4
    assert backwards_of(model) > 4


class WritesWhatItSaved(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(2, 2)

    def forward(self, x):
        y = self.layer(x).sigmoid()
        z = y * y
        y.mul_(3)
        return z


@pytest.mark.filterwarnings("ignore:replay.* goes on recording")
def test_a_module_that_writes_what_its_backward_needs_raises_as_in_eager():
    model = replay(WritesWhatItSaved())
    for _ in range(6):
        loss = model(torch.ones(1, 2)).sum()
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            loss.backward()


class Energy(nn.Module):
    """Its result is a gradient, by `torch.func.grad`, which allows no hooks for saved tensors."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(3))

    def forward(self, x):
        return torch.func.grad(lambda y: (y * self.weight).sin().sum())(x) * self.weight.exp()


@pytest.mark.filterwarnings("ignore:replay")
def test_gradients_of_torch_func_inside():
    model = Energy()
    lazy = replay(copy.deepcopy(model))
    for i in range(6):
        x = torch.randn(2, 3) + i
        found, expected = lazy(x), model(x)
        found.sum().backward()
        expected.sum().backward()
        assert torch.allclose(found, expected)
        grads: Any = lazy.weight.grad, model.weight.grad
        assert torch.allclose(*grads)


@pytest.mark.parametrize("is_batched", [False, True])
def test_backward_in_a_vmap_runs_a_forward_that_draws_again_outside_of_it(is_batched):
    lazy = nn.Sequential(nn.Linear(6, 3), nn.Dropout(0.2))
    model = copy.deepcopy(lazy)
    replay(lazy)
    many = torch.eye(6).view(6, 2, 3)
    for i in range(8):
        x = torch.randn(2, 6)
        found: list[Any] = []
        for net in (model, lazy):
            torch.manual_seed(i)
            y, weight = net(x), next(net.parameters())
            found += torch.autograd.grad(y[0, 0], weight, retain_graph=True)
            of_one = partial(torch.autograd.grad, y, weight, retain_graph=True)
            found += of_one(many, is_grads_batched=True) if is_batched else torch.vmap(of_one)(many)
        torch.testing.assert_close(found[2:], found[:2])
