"""One plan of `replay` for calls whose tensors differ in sizes, against eager."""

import copy
import random
import warnings
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils import _pytree as pytree

from lazy_tensor import replay
from lazy_tensor.dispatch.plan import plan

N = 40
"""Calls of each program. Some are recorded: until three sizes were compared, to confirm larger
ones, for checks, and to give a size that settles a plan of its own."""


@pytest.fixture(autouse=True)
def no_op_chooses_strides(monkeypatch):
    """Other tests may have ops of their own under the names of torch's."""
    monkeypatch.setattr(plan, "OWN_STRIDES", set())


def flattened(batches, width):
    linear = nn.Linear(width, width)

    def step(x):
        b, n, d = x.shape
        return linear(x).view(b * n, d).sum(0) / (b * n), x.reshape(b, -1)

    return step, lambda rng: (torch.randn(batches(rng), rng.randint(2, 20), width),)


def two_sizes():
    return flattened(lambda rng: rng.randint(2, 9), 8)


def one_size():
    return flattened(lambda _: 3, 5)


def branch_by_size():
    def step(x):
        return x * 2 if x.shape[0] > 10 else x + 1

    return step, lambda rng: (torch.randn(rng.randint(2, 20)),)


def padded():
    def step(x):
        n = x.shape[0]
        room = torch.zeros((n + 7) // 8 * 8)
        room[:n] = x
        return room.view(-1, 8).sum(1)

    return step, lambda rng: (torch.randn(rng.randint(9, 40)),)


def compared_shapes():
    def step(x, y):
        return x + y if x.shape == y.shape else x.sum() + y.sum()

    return step, lambda rng: (torch.randn(rng.randint(2, 5)), torch.randn(rng.randint(2, 5)))


def positions():
    words, places = nn.Embedding(64, 8), nn.Embedding(64, 8)

    def step(ids):
        n = ids.shape[1]
        seen = torch.full((n, n), float("-inf")).triu(1)
        x = words(ids) + places(torch.arange(n))
        return (x @ x.mT / n**0.5 + seen).softmax(-1)

    return step, lambda rng: (torch.randint(0, 64, (rng.randint(2, 5), rng.randint(2, 40))),)


def images():
    layers = nn.Sequential(nn.Conv2d(1, 4, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2))

    def step(x):
        y = layers(x)
        h, w = y.shape[-2:]
        return y.flatten(1), y.view(len(y), 4, h * w).mean(-1)

    return step, lambda rng: (torch.randn(2, 1, 2 * rng.randint(3, 9), 2 * rng.randint(3, 9)),)


def slices():
    table = torch.randn(64, 4)

    def step(x):
        n = x.shape[0]
        return x + table[:n], x[1:] - x[:-1], x[: n // 2]

    return step, lambda rng: (torch.randn(2 * rng.randint(2, 20), 4),)


def gaps():
    big = torch.randn(30, 30)

    def step(x):
        return (x @ x.t()).reshape(-1).sum(), x.contiguous().view(-1), x.t().reshape(-1)

    return step, lambda rng: (big[: rng.randint(2, 30), : rng.randint(2, 30)],)


def random_numbers():
    layers = nn.Sequential(nn.Linear(6, 12), nn.Dropout(0.3))

    def step(x):
        n = x.shape[0]
        drawn = (
            torch.rand(n),
            torch.randperm(n),
            torch.randint(0, n, (3,)),
            x.new_zeros(n).normal_(),
        )
        return layers(x), *drawn

    return step, lambda rng: (torch.randn(rng.randint(3, 30), 6),)


def written_in_place():
    sums = torch.zeros(64, 3)

    def step(x):
        sums[: x.shape[0]] += x
        return sums.sum(0)

    return step, lambda rng: (torch.randn(rng.randint(2, 40), 3),)


def mask_read():
    def step(x, mask):
        return x.sum() if mask.all() else (x * mask).sum()

    def arguments(rng):
        n = rng.randint(2, 30)
        return torch.randn(n), torch.rand(n) < rng.choice([0.5, 2.0])

    return step, arguments


def numbers_of_sizes():
    def step(x, scale):
        n = x.shape[0]
        return x.sum() * scale / n, n * 2, x / n**0.5, x.mean().item() * n

    return step, lambda rng: (torch.randn(rng.randint(2, 30)), rng.random())


def attention():
    layer = nn.MultiheadAttention(16, 4, batch_first=True).eval()
    return lambda x: layer(x, x, x, need_weights=False)[0], lambda rng: (
        torch.randn(2, rng.randint(3, 20), 16),
    )


def float_before_size():
    """Python asks no size what a float on its left does with it."""

    def step(x):
        return x * 2 if 0.5 * x.shape[0] > 6 else x * 3

    return step, lambda rng: (torch.randn(rng.randint(2, 20)),)


def other_structure():
    def step(x):
        return sum(row * i for i, row in enumerate(x))

    return step, lambda rng: (torch.randn(rng.randint(3, 8), 3),)


PROGRAMS = {
    two_sizes: 18, one_size: 25, branch_by_size: 18, padded: 15, compared_shapes: 18, positions: 22,
    images: 12, slices: 22, gaps: 8, random_numbers: 22, written_in_place: 22, mask_read: 15,
    numbers_of_sizes: 20, attention: 25, float_before_size: 5, other_structure: 1,
}  # fmt: skip
"""The programs, and how many of `N` calls are replayed at least."""


def calls_of(make, wrap):
    torch.manual_seed(0)
    step, arguments = make()
    step, rng, given = wrap(step), random.Random(1), []
    with torch.no_grad():
        for i in range(N):
            torch.manual_seed(i)
            given.append(step(*arguments(rng)))
    return given, step


def assert_equal(actual, expected):
    for one, other in zip(*map(pytree.tree_leaves, (actual, expected)), strict=True):
        if isinstance(other, torch.Tensor):
            assert one.stride() == other.stride()
            torch.testing.assert_close(one.clone(), other, rtol=0, atol=0)
        else:
            assert type(one) is type(other)
            assert one == other


@pytest.mark.parametrize("make", PROGRAMS, ids=lambda make: make.__name__)
def test_calls_of_many_sizes_are_replayed(make):
    expected, _ = calls_of(make, lambda step: step)
    actual, step = calls_of(
        make, lambda step: replay(step, backend="aten", check_every=7, sizes="any")
    )
    assert_equal(actual, expected)
    assert step.n_replayed >= PROGRAMS[make], step.summary()


def training(wrap, optimizer, last):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 12), nn.LayerNorm(12), nn.GELU(), nn.Linear(12, last))
    opt = optimizer(model.parameters())

    def step(x, y):
        opt.zero_grad()
        loss = F.cross_entropy(model(x), y)
        loss.backward()
        opt.step()
        return loss.detach()

    step, rng, losses = wrap(step), random.Random(2), []
    for _ in range(N):
        n = rng.randint(2, 30)
        losses.append(step(torch.randn(n, 6), torch.randint(0, last, (n,))))
    return [*losses, *(p.detach() for p in model.parameters())], step


@pytest.mark.parametrize("optimizer", [torch.optim.SGD, torch.optim.AdamW])
def test_training_steps_on_batches_of_many_sizes(optimizer):
    expected, _ = training(lambda step: step, optimizer, 3)
    actual, step = training(lambda step: replay(step, backend="aten", sizes="any"), optimizer, 3)
    assert_equal(actual, expected)
    assert step.n_replayed >= 25, step.summary()


class Cache:
    def __init__(self, scale=1, n_more=0):
        self.keys = torch.randn(1, 2, 4)
        self.scale, self.more = scale, [torch.ones(1)] * n_more


def grown(cache, weight, x):
    cache.keys = torch.cat([cache.keys, x @ weight], 1)
    return (x @ cache.keys.mT).softmax(-1) @ cache.keys


@torch.no_grad()
def test_a_cache_in_the_state_grows():
    torch.manual_seed(0)
    weight, cache, other = torch.randn(4, 4), Cache(), Cache()
    other.keys = cache.keys.clone()
    step = replay(lambda x: grown(cache, weight, x), backend="aten", sizes="any")
    for _ in range(N):
        x = torch.randn(1, 1, 4)
        assert torch.equal(step(x).clone(), grown(other, weight, x))
    assert torch.equal(cache.keys.clone(), other.keys)
    assert step.n_replayed >= 20, step.summary()


@torch.no_grad()
def test_caches_among_the_arguments_share_a_plan():
    torch.manual_seed(0)
    weight = torch.randn(4, 4)

    def attend(x, cache):
        return grown(cache, weight, x), cache

    step, n_replayed = replay(attend, state=[weight], backend="aten", sizes="any"), []
    for _ in range(4):
        cache, other = Cache(), Cache()
        other.keys = cache.keys.clone()
        for _ in range(N):
            x = torch.randn(1, 1, 4)
            actual, returned = step(x, cache)
            assert returned is cache
            assert torch.equal(actual.clone(), grown(other, weight, x))
        assert torch.equal(cache.keys.clone(), other.keys)
        n_replayed.append(step.n_replayed)
    assert n_replayed[1] - n_replayed[0] >= N - 5, step.summary()
    assert n_replayed[3] - n_replayed[2] >= N - 3, step.summary()


@torch.no_grad()
def test_another_object_must_hold_the_same():
    """A plan is moved to another cache only if that holds equal numbers, and as many tensors."""
    torch.manual_seed(0)

    def attend(x, cache):
        cache.keys = torch.cat([cache.keys, x], 1)
        return cache.keys * cache.scale + sum(cache.more)

    step = replay(attend, state=[], backend="aten", sizes="any")
    for scale, n_more in ((1, 1), (2, 1), (2, 3)):
        cache = Cache(scale, n_more)
        for _ in range(12):
            x = torch.randn(1, 1, 4)
            expected = torch.cat([cache.keys.clone(), x], 1) * scale + n_more
            assert torch.equal(step(x, cache).clone(), expected)


def test_sizes_of_zero_and_one_are_recorded_apart():
    step = replay(lambda x, y: (x + y, (x * y).reshape(-1)), backend="aten", sizes="any")
    rng, y = random.Random(0), torch.arange(12.0)
    for n in [5, 7, 6, 9, 1, 0, 8, 1, 2, 1, 3, 0]:
        x = torch.randn(n, 1) if rng.random() < 0.5 else torch.randn(n, 12)
        for one, other in zip(step(x, y), (x + y, (x * y).reshape(-1)), strict=True):
            assert torch.equal(one.clone(), other)


def test_by_default_each_size_has_a_plan_of_its_own():
    step = replay(lambda x: x.sin() + 1)
    with warnings.catch_warnings(record=True):  # that sizes change
        warnings.simplefilter("always")
        for n in range(2, 30):
            step(torch.ones(n))
    assert step.n_replayed == 0


def test_a_size_that_settles_gets_a_plan_of_its_own():
    step = replay(lambda x: x.sin() + 1, backend="aten", check_every=0, sizes="any")
    for n in [3, 4, 5, 6, 7, *[5] * 40]:
        assert torch.equal(step(torch.ones(n)).clone(), torch.ones(n).sin() + 1)
    (of_one_size,) = [one for one in step.captured() if one.any_size is None]
    assert of_one_size.n_runs > 15


def test_no_warning_where_one_plan_runs_all_sizes():
    step = replay(lambda x: x.sin() + 1, sizes="any")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for n in range(2, 60):
            step(torch.ones(n))
    assert step.n_replayed > 40


def test_tensors_are_as_before_after_a_recorded_call():
    """The patches of `Tensor` are gone after a recorded call."""
    step = replay(lambda x: x.view(x.shape[0], -1), backend="aten", sizes="any")
    for n in range(2, 12):
        step(torch.ones(n, 2, 2))
    assert not {"shape", "size", "numel", "nelement", "stride"} & vars(torch.Tensor).keys()
    assert type(torch.ones(3).shape[0]) is int


def test_a_function_may_keep_a_size():
    class Model:
        def __init__(self):
            self.longest = 0

        def __call__(self, x):
            self.longest = max(self.longest, x.shape[0])
            return x * self.longest

    model = Model()
    step, longest = replay(model, backend="aten", sizes="any"), 0
    for n in [4, 5, 6, 7, 8, 3, 9, 2, 5, 6, 11, 4]:
        longest = max(longest, n)
        assert torch.equal(step(torch.ones(n)).clone(), torch.ones(n) * longest)
        assert type(model.longest) is int
        assert model.longest == longest


def unread(x, other):
    """Only the size of `other` matters."""
    return x + torch.arange(other.shape[0], other.shape[0] + x.shape[0])


def decided_by_another(x, other):
    return x * 2 if other.shape[0] > 50 else x * 3


def a_number_from_another(x, other):
    return x * other.shape[0]


def as_many_as(x, other):
    """Torch makes no slice where `x` has fewer columns."""
    return x[: other.shape[0]] * 2


def rounded(x, other):
    return torch.zeros(x.shape[0] // 4 * 4), other.sum()


def smaller_of_two(x, other):
    d = torch.outer(x, other).diagonal()
    return d.sum() / d.shape[0], d.shape[0]


def decided_in_cpp(x, other):
    return torch.cdist(x[:, None], other[:, None])


def moved_by_stride(x, other):
    return x * 2 if torch.outer(x, other).stride(0) % 2 else x * 3


def powers(x, other):
    n = other.shape[0]
    return x * pow(n, 2, 7) * n.real, (n, 1)


OTHERS = [
    unread, decided_by_another, a_number_from_another, as_many_as, rounded, smaller_of_two,
    decided_in_cpp, moved_by_stride, powers,
]  # fmt: skip
LENGTHS = [(4, 8), (9, 13), (5, 9), (7, 11), (6, 10), (8, 6), (9, 30), (6, 100), (8, 8), (5, 13)]


@pytest.mark.parametrize("function", OTHERS, ids=lambda function: function.__name__)
def test_sizes_that_no_op_tells(function):
    torch.manual_seed(0)
    step = replay(function, backend="aten", check_every=0, sizes="any")
    for n, m in LENGTHS:
        arguments = torch.randn(n), torch.randn(m)
        assert_equal(step(*arguments), function(*arguments))


def test_the_size_of_a_replaced_tensor_that_no_op_reads():
    def made():
        class State:
            last = torch.zeros(5)

        state = State()
        state.last = torch.zeros(5)

        def step(x):
            n = state.last.shape[0]
            state.last = x * 2
            return x * n

        return step

    eager, step, rng = made(), replay(made(), backend="aten", sizes="any"), random.Random(0)
    for i in range(N):
        x = torch.ones(5 + i if i < 12 else rng.randint(5, 16))
        assert torch.equal(step(x).clone(), eager(x))


def test_a_reshape_that_is_a_view_at_one_size_alone():
    def step(x):
        y = x.reshape(-1, 3)
        y += 1
        return y.sum()

    step = replay(step, backend="aten", check_every=0, sizes="any")
    for n in range(7, 13):
        memory = torch.zeros(6, 12, 4)
        step(memory[:, :n, :3])
        assert bool(memory.sum() > 0) == (n == 12)


@pytest.mark.parametrize("optimizer", [torch.optim.NAdam, torch.optim.RAdam])
def test_step_counts_of_optimizers(optimizer):
    expected, _ = training(lambda step: step, optimizer, 3)
    options: Any = {"backend": "aten", "sizes": "any", "check_every": 4}
    actual, step = training(lambda step: replay(step, **options), optimizer, 3)
    assert_equal(actual, expected)
    assert step.n_replayed >= 15, step.summary()


class Pair(NamedTuple):
    n: int
    x: torch.Tensor


def test_sizes_that_the_call_keeps_are_plain_numbers_afterwards():
    class Keeper:
        total = 0
        shape: Any
        pair: Any

    keeper, counts, seen = Keeper(), {}, set()

    def step(x):
        n = x.shape[0]
        Keeper.total += n
        keeper.shape, keeper.pair = x.shape, (n, 1)
        counts[n] = n
        seen.add(n)
        return Pair(n, x * 1)

    step = replay(step, backend="aten", sizes="any")
    for n in range(3, 12):
        given = step(torch.ones(n))
        kept = [given.n, keeper.total, *keeper.shape, *keeper.pair, *seen]
        kept += [*counts, *counts.values()]
        assert {*map(type, kept)} == {int}
        assert Keeper.total == sum(range(3, n + 1))


def module_losses(wrap):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 16), nn.GELU(), nn.Dropout(0.2), nn.Linear(16, 4))
    opt, rng, losses = torch.optim.AdamW(model.parameters(), lr=0.01), random.Random(3), []
    model = wrap(model)
    for _ in range(N):
        n = rng.randint(2, 30)
        opt.zero_grad()
        loss = F.cross_entropy(model(torch.randn(n, 6)), torch.randint(0, 4, (n,)))
        loss.backward()
        opt.step()
        losses.append(loss.item())
    return losses, model


def test_a_model_in_training_on_batches_of_many_sizes():
    expected, _ = module_losses(lambda model: model)
    actual, model = module_losses(lambda model: replay(model, backend="aten", sizes="any"))
    assert actual == expected
    calls: Any = model._compiled_call_impl
    assert calls.forward.n_replayed >= 15, calls.forward.summary()


def closure(k):
    return lambda x: x * k


class Holder:
    def __init__(self, scale):
        self.scale, self.inner = np.array([scale]), [scale]


OBJECTS = {
    "functions of torch": (torch.sin, torch.cos, lambda x, f: f(x) + 1),
    "closures": (closure(2.0), closure(3.0), lambda x, f: f(x) + 1),
    "generators": (
        torch.Generator().manual_seed(1), torch.Generator().manual_seed(2),
        lambda x, g: x + torch.rand(x.shape, generator=g),
    ),
    "arrays in objects": (Holder(2.0), Holder(3.0), lambda x, h: x * float(h.scale[0])),
    "what an object holds": (Holder(2.0), Holder(3.0), lambda x, h: (x * 2, h.inner)),
}  # fmt: skip


@pytest.mark.parametrize("sizes", ["fixed", "any"])
@pytest.mark.parametrize("which", OBJECTS)
def test_other_objects_that_do_something_else(which, sizes):
    one, two, function = OBJECTS[which]
    eager = [copy.copy(one), copy.copy(two)] if which != "generators" else None
    if eager is None:
        eager = [torch.Generator().manual_seed(seed) for seed in (1, 2)]
        one, two = [torch.Generator().manual_seed(seed) for seed in (1, 2)]
    step = replay(function, backend="aten", sizes=sizes, state=[])
    for given, other in [*[(one, eager[0])] * 8, *[(two, eager[1])] * 4, (one, eager[0])]:
        x = torch.arange(6.0)
        actual, expected = step(x, given), function(x, other)
        assert_equal(actual, expected)
        if isinstance(actual, tuple):
            assert actual[1] is given.inner


def test_a_plan_that_a_check_has_refuted_does_not_come_back():
    class Held:
        t = torch.ones(3)

    scale, held = [2.0], Held()
    step = replay(lambda x, h: x * scale[0] + h.t, state=[Held()], check_every=0, sizes="any")
    for _ in range(6):
        step(torch.ones(3), held)
    scale[0] = 3.0
    with pytest.raises(RuntimeError, match="did something else"):
        step.call((torch.ones(3), held), {}, checks=True)
    assert step(torch.ones(3), held).tolist() == [4.0] * 3


def test_a_named_tuple_of_its_own_making_is_returned_as_it_is():
    class Named(Pair):
        def __new__(cls, x):
            return super().__new__(cls, 1, x)

    kept = Named(torch.ones(3))
    step = replay(lambda x: kept)
    for _ in range(5):
        assert step(torch.ones(3)) is kept
