"""Writes that must neither flush nor copy: caches filled slice by slice, optimizers' updates."""

import pytest
import torch

from lazy_tensor import flush, is_pending, lazy_mode, stats, wrap
from lazy_tensor.dispatch.trie.trace import Node, local
from tests.invariants.compare import WAYS, assert_agrees

COPIES = ("aten.copy_", "aten.clone", "aten._to_copy", "aten.set_")


def pending_ops():
    """The ops that wait in this thread's trace, as text."""
    return [str(step.facts.op) for step in local.trace.state.steps() if isinstance(step, Node)]


def slices(x):
    cache = torch.zeros(4, 6)
    for i in range(6):
        cache[:, i] = x[:, i % 4] + i
    return cache


def key_value_cache(x):
    keys = torch.zeros(1, 2, 8, 4)
    outputs = []
    for i in range(4):
        keys[:, :, i : i + 1] = (x[i] + 1).expand(1, 2, 1, 4)
        outputs.append(keys[:, :, : i + 1].sum(2))
    return keys, *outputs


def cache_by_index(x):
    keys, place = torch.zeros(2, 8, 4), torch.tensor([2, 5])
    keys.index_copy_(1, place, (x[:2] + 1).expand(2, 2, 4))
    return keys, keys.sum(1)


def views_of_views(x):
    y = x + 1
    y[1:][:2].t()[0].mul_(3)
    y.narrow(0, 2, 1).zero_()
    return y, y.sum()


def augmented(x):
    y = x + 1
    y[0] += 2
    y[:, 1] *= x[:, 0]
    return y


PROGRAMS = [slices, key_value_cache, cache_by_index, views_of_views, augmented]
each_program = pytest.mark.parametrize("program", PROGRAMS, ids=lambda program: program.__name__)
each_way = pytest.mark.parametrize("way", WAYS)


@each_program
@each_way
def test_slice_writes_agree(program, way):
    assert_agrees(way, program, torch.rand(4, 4))


@pytest.mark.recorded
@each_program
def test_slice_writes_do_not_flush(program):
    x = torch.rand(4, 4)
    for n_passes in (1, 2, 3):
        with lazy_mode():
            results = program(x)
            assert all(map(is_pending, results if isinstance(results, tuple) else [results]))
            assert stats()["flushes"] == n_passes - 1
    assert set(stats()["flush_causes"]) == {"exit"}


OPTIMIZERS = {
    "sgd": lambda p: torch.optim.SGD(p, 0.1, momentum=0.9),
    "sgd in a loop": lambda p: torch.optim.SGD(p, 0.1, momentum=0.9, foreach=False),
    "adam": lambda p: torch.optim.Adam(p, 0.1),
    "adamw in a loop": lambda p: torch.optim.AdamW(p, 0.1, foreach=False),
    "adamw fused": lambda p: torch.optim.AdamW(p, 0.1, fused=True),
    "rmsprop": lambda p: torch.optim.RMSprop(p, 0.1),
    "rmsprop in a loop": lambda p: torch.optim.RMSprop(p, 0.1, foreach=False),
}
READS_NORMS = {  # once or twice a parameter, as Python numbers
    "adafactor": lambda p: torch.optim.Adafactor(p),
    "adafactor foreach": lambda p: torch.optim.Adafactor(p, foreach=True),
}
each_optimizer = pytest.mark.parametrize("make", OPTIMIZERS.values(), ids=OPTIMIZERS.keys())


def steps(parameters, optimizer, n_steps=4):
    """Train; the ops of each `step()`, the last of which are from a trace seen before."""
    ops = []
    for _ in range(n_steps):
        optimizer.zero_grad()
        torch.stack([(p * p).sum() for p in parameters]).sum().backward()
        before = len(pending_ops())
        optimizer.step()
        ops.append(pending_ops()[before:])
        parameters[0].sum().item()
    return ops


@each_optimizer
@each_way
def test_an_optimizer_writes_into_the_parameters_own_memory(make, way):
    parameters = [torch.nn.Parameter(torch.rand(n, 3)) for n in (2, 4)]
    addresses = [p.data_ptr() for p in parameters]
    if way == "wrap":
        wrap(torch.nn.ParameterList(parameters))
        steps(parameters, make(parameters))
    else:
        with lazy_mode():
            steps(parameters, make(parameters))
    assert [p.data_ptr() for p in parameters] == addresses


@pytest.mark.recorded
@each_optimizer
@each_way
def test_an_optimizers_step_copies_nothing(make, way):
    parameters = [torch.nn.Parameter(torch.rand(n, 3)) for n in (2, 4)]
    if way == "wrap":
        wrap(torch.nn.ParameterList(parameters))
        ops = steps(parameters, make(parameters))
    else:
        with lazy_mode():
            ops = steps(parameters, make(parameters))
    assert all(ops)
    for of_step in ops[1:]:  # the first makes the state
        assert not [op for op in of_step if op.startswith(COPIES)]


@each_optimizer
def test_an_optimizers_step_does_not_flush(make):
    parameters = [torch.nn.Parameter(torch.rand(n, 3)) for n in (2, 4)]
    with lazy_mode():
        optimizer = make(parameters)
        for _ in range(3):
            torch.stack([(p * p).sum() for p in parameters]).sum().backward()
            optimizer.step()
        assert stats()["flushes"] == 0


def test_a_parameter_read_by_a_view_taken_earlier_shows_the_update():
    p = torch.nn.Parameter(torch.ones(4))
    view = p.detach()[1:]
    with lazy_mode():
        optimizer = torch.optim.SGD([p], 0.5)
        p.sum().backward()
        before = view * 2
        optimizer.step()
        after = view * 2
    assert before.tolist() == [2.0] * 3
    assert after.tolist() == [1.0] * 3
    assert view.tolist() == [0.5] * 3


@pytest.mark.parametrize(
    "make", [*OPTIMIZERS.values(), *READS_NORMS.values()], ids=[*OPTIMIZERS, *READS_NORMS]
)
@pytest.mark.parametrize("scales", [False, True], ids=["float32", "scaled"])
def test_a_changing_step_compiles_nothing_and_copies_nothing(make, scales, counting):
    def new_model():
        torch.manual_seed(0)
        return torch.nn.Sequential(*[torch.nn.Linear(8, 8) for _ in range(4)])

    def train(model, n_steps=7):
        optimizer = make(model.parameters())
        scaler = torch.amp.GradScaler("cpu", enabled=scales, init_scale=64.0)
        n_compiled = []
        for _ in range(n_steps):
            optimizer.zero_grad()
            with torch.autocast("cpu", torch.bfloat16, enabled=scales):
                loss = model(x).square().mean()
            scaler.scale(loss).backward()
            scaler.unscale_(optimizer)
            torch.nn.utils.clip_grad_norm_(model.parameters(), 0.1)
            scaler.step(optimizer)
            scaler.update()
            for group in optimizer.param_groups:
                group["lr"] *= 0.9
            flush()
            n_compiled.append(len(counting.segments))
        return [p.detach() for p in model.parameters()], n_compiled

    x, model = torch.rand(4, 8), new_model()
    expected, _ = train(new_model())
    with lazy_mode():
        got, n_compiled = train(model)
    for mine, theirs in zip(got, expected, strict=True):
        assert torch.equal(mine, theirs)
    assert n_compiled[3] == n_compiled[-1] > 0
    copies = [c for s in counting.segments for c in s.calls if str(c.op).startswith("aten.copy_")]
    assert not copies
