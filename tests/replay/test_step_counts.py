"""Replays of optimizers that compute numbers from their step counts, against eager."""

import copy
import math
import sys
import threading
import types
import warnings

import pytest
import torch
from torch import nn, optim

import lazy_tensor
from lazy_tensor import replay

N = 24


def reader():
    """What Adam reads its step count with."""
    return vars(sys.modules["torch.optim.adam"])["_get_value"]


READ_BY_TORCH = reader()


@pytest.fixture(autouse=True)
def quiet():
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="replay.* goes on recording")
        # whose `step` was taken before the scheduler wrapped it
        warnings.filterwarnings("ignore", message="Detected call of `lr_scheduler.step")
        yield


class Pair:
    """The same parameters and optimizer twice: eager's, and those whose step is replayed."""

    def __init__(self, make, wrap=replay):
        torch.manual_seed(0)
        shapes = [(3, 4), (5,), (3, 4), (2, 2)]
        values = [torch.randn(shape) for shape in shapes]
        self.eager = [nn.Parameter(value.clone()) for value in values]
        self.lazy = [nn.Parameter(value.clone()) for value in values]
        self.optimizers = [make(self.eager), make(self.lazy)]
        self.step = wrap(self.optimizers[1].step)
        self.generator = torch.Generator().manual_seed(1)

    def take(self, n=1, without=()):
        for _ in range(n):
            for i, (p, q) in enumerate(zip(self.eager, self.lazy, strict=True)):
                gradient = torch.randn(p.shape, generator=self.generator)
                p.grad = None if i in without else gradient.clone()
                q.grad = None if i in without else gradient.clone()
            self.optimizers[0].step()
            self.step()
            for p, q in zip(self.eager, self.lazy, strict=True):
                assert torch.equal(lazy_tensor.materialize(q.detach()), p.detach())

    @property
    def n_replayed(self):
        return self.step.n_replayed

    def states(self):
        """Each optimizer's states of its parameters."""
        return [[o.state[p] for p in o.param_groups[0]["params"]] for o in self.optimizers]


COUNTING = {
    "adam": lambda p: optim.Adam(p, foreach=False),
    "adam foreach": lambda p: optim.Adam(p, foreach=True),
    "adamw decoupled": lambda p: optim.AdamW(p, foreach=False, maximize=True),
    "adamw foreach amsgrad": lambda p: optim.AdamW(p, foreach=True, amsgrad=True),
    "nadam": lambda p: optim.NAdam(p, foreach=False),
    "nadam foreach": lambda p: optim.NAdam(p, foreach=True),
    "radam": lambda p: optim.RAdam(p, foreach=False),
    "radam foreach": lambda p: optim.RAdam(p, foreach=True),
    "adamax foreach": lambda p: optim.Adamax(p, foreach=True),
    "adagrad": lambda p: optim.Adagrad(p, lr_decay=0.1, foreach=False),
    "adagrad foreach": lambda p: optim.Adagrad(p, lr_decay=0.1, foreach=True),
}


@pytest.mark.parametrize("name", COUNTING)
def test_steps_are_replayed_and_bit_equal(name):
    pair = Pair(COUNTING[name])
    pair.take(2 * N)  # rectified Adam goes another way from the sixth step on
    assert pair.n_replayed >= N // 2, pair.step.obstacle
    assert reader() is READ_BY_TORCH


def test_with_kernels_the_numbers_are_inputs():
    pair = Pair(COUNTING["adam"], lambda step: replay(step, backend="inductor", compile="blocking"))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch, "equal", lambda a, b: torch.allclose(a, b, atol=1e-6))
        pair.take(8)
        compiled = lazy_tensor.stats()["compiled"]
        pair.take(N)
    assert pair.n_replayed >= N
    assert lazy_tensor.stats()["compiled"] == compiled


def test_a_count_that_is_set_is_read_anew():
    pair = Pair(COUNTING["adam foreach"])
    pair.take(N // 2)
    for states in pair.states():
        for state in states:
            state["step"].fill_(1000.0)
    before = pair.n_replayed
    pair.take(4)
    assert pair.n_replayed == before + 4


@pytest.mark.parametrize("name", ["adam", "adam foreach"])
def test_counts_that_part_are_told_apart(name):
    pair = Pair(COUNTING[name])
    pair.take(N // 2)
    for states in pair.states():
        states[1]["step"].add_(3.0)
    before = pair.n_replayed
    pair.take(N)
    assert before > 0
    assert pair.n_replayed > before, pair.step.obstacle


def test_a_parameter_without_gradient_leaves_its_count_behind():
    pair = Pair(COUNTING["adam"])
    pair.take(3)
    pair.take(1, without=(2,))
    pair.take(N)
    assert pair.n_replayed >= N - 9, pair.step.obstacle


def test_numbers_that_no_longer_change_may_change_again():
    """1 - 0.9 ** step is 1 from some step on: a constant, as long as it is one."""
    pair = Pair(lambda p: optim.Adam(p, betas=(0.9, 0.9), foreach=True))
    pair.take(1)
    for states in pair.states():
        for state in states:
            state["step"].fill_(1000.0)
    pair.take(8)
    before = pair.n_replayed
    assert before > 0
    for states in pair.states():
        for state in states:
            state["step"].fill_(2.0)
    pair.take(N)
    assert pair.n_replayed > before


class Plain(optim.SGD):
    """Reads its count in some way that isn't arithmetic."""

    def __init__(self, params, read):
        super().__init__(params, lr=0.1)
        self.read = read
        self.count = torch.tensor(0.0)

    @torch.no_grad()
    def step(self, closure=None):
        self.count += 1
        number = self.read(reader()(self.count))
        for p in self.param_groups[0]["params"]:
            if p.grad is not None:
                p.add_(p.grad, alpha=-0.1 * number)


@pytest.mark.parametrize(
    "read",
    [int, round, hash, str, lambda c: c // 2, math.floor, lambda c: {c: 1.0}[c],
     lambda c: f"{c:.2f}", copy.copy],
)  # fmt: skip
def test_counts_that_become_something_else_are_not_replayed(read):
    pair = Pair(lambda p: Plain(p, lambda count: float(read(count))))
    pair.take(N)
    assert pair.n_replayed == 0
    assert "depends on numbers" in pair.step.obstacle


@pytest.mark.parametrize(
    "read",
    [
        lambda c: c if c > 10 else 1.0,
        lambda c: max(c, 10),
        lambda c: 2.0 if c == 12.0 else c,
        lambda c: abs(-c) + (+c) * 2 / (1 + c**2) if c else 0.0,
    ],
)
def test_branches_on_counts_are_watched(read):
    pair = Pair(lambda p: Plain(p, read))
    pair.take(2 * N)
    assert pair.n_replayed > N, pair.step.obstacle


def test_a_count_outlives_its_call_as_a_number():
    kept = []

    class Keeping(Plain):
        @torch.no_grad()
        def step(self, closure=None):
            self.count += 1
            number = reader()(self.count)
            kept.append(number)
            for p in self.param_groups[0]["params"]:
                p.add_(p.grad, alpha=-0.1 / number)

    pair = Pair(lambda p: Keeping(p, None))
    pair.take(4)
    assert [float(number) for number in kept[1::2]] == [1.0, 2.0, 3.0, 4.0]
    assert {type(number + 1) for number in kept} == {float}


def test_other_threads_read_as_ever():
    pair, found = Pair(COUNTING["adam"]), []
    stop = threading.Event()

    def train():
        parameter = nn.Parameter(torch.ones(3))
        parameter.grad = torch.ones(3)
        other = optim.Adam([parameter])
        while not stop.is_set():
            other.step()
        found.append(other.state[parameter]["step"].item())

    thread = threading.Thread(target=train)
    thread.start()
    pair.take(N)
    stop.set()
    thread.join()
    assert found[0] > 0
    assert pair.n_replayed > 0
    assert reader() is READ_BY_TORCH


def of_one_parameter(rate):
    """An optimizer, and its parameter with a gradient."""
    parameter = nn.Parameter(torch.ones(3))
    parameter.grad = torch.ones(3)
    return parameter, optim.SGD([parameter], lr=rate)


SCHEDULES = {
    "every step": lambda o: optim.lr_scheduler.CosineAnnealingLR(o, 4 * N),
    "warm-up": lambda o: optim.lr_scheduler.LinearLR(o, 0.1, total_iters=N // 2),
    "now and then": lambda o: optim.lr_scheduler.StepLR(o, 5),
}


@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("name", [*COUNTING, "sgd", "rmsprop", "adamw fused"])
def test_scheduled_rates_are_inputs(name, schedule):
    others = {
        "sgd": lambda p: optim.SGD(p, lr=0.1, momentum=0.9, weight_decay=0.1),
        "rmsprop": lambda p: optim.RMSprop(p, lr=0.1),
        "adamw fused": lambda p: optim.AdamW(p, lr=0.1, fused=True),
    }
    pair = Pair((COUNTING | others)[name])
    schedulers = [SCHEDULES[schedule](optimizer) for optimizer in pair.optimizers]
    for _ in range(3 * N):
        pair.take()
        for scheduler in schedulers:
            scheduler.step()
        rates = [optimizer.param_groups[0]["lr"] for optimizer in pair.optimizers]
        assert rates[0] == rates[1]
        assert type(rates[1]) is float
    assert pair.n_replayed >= N, pair.step.obstacle


SCHEDULERS = SCHEDULES | {
    "soon": lambda o: optim.lr_scheduler.MultiStepLR(o, [3, 9, 20]),
    "one cycle": lambda o: optim.lr_scheduler.OneCycleLR(
        o, 0.5, total_steps=9 * N, cycle_momentum=False
    ),
    "by a function": lambda o: optim.lr_scheduler.LambdaLR(o, lambda epoch: 1 / (epoch + 1)),
    "one after another": lambda o: optim.lr_scheduler.SequentialLR(
        o,
        [
            optim.lr_scheduler.LinearLR(o, 0.1, total_iters=10),
            optim.lr_scheduler.CosineAnnealingLR(o, 2 * N),
        ],
        milestones=[10],
    ),
    "several": lambda o: optim.lr_scheduler.ChainedScheduler(
        [optim.lr_scheduler.ExponentialLR(o, 0.99), optim.lr_scheduler.StepLR(o, 7)]
    ),
}


def scheduled(schedule, make, then=None):
    """A training step that steps its scheduler, and its optimizer."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 1))
    optimizer = make(model.parameters())
    scheduler = SCHEDULERS[schedule](optimizer)

    def step(x):
        optimizer.zero_grad()
        loss = model(x).square().mean()
        loss.backward()
        optimizer.step()
        scheduler.step()
        return loss.item(), None if then is None else then(optimizer, scheduler)

    return step, optimizer, scheduler


class Trainer:
    """Its rate and that of the optimizer have one name."""

    def __init__(self, lr=0.1):
        torch.manual_seed(0)
        self.model = nn.Linear(4, 1)
        self.optimizer = optim.SGD(self.model.parameters(), lr=lr)
        self.scheduler = optim.lr_scheduler.StepLR(self.optimizer, 3, gamma=0.5)

    def step(self, x):
        self.optimizer.zero_grad()
        loss = self.model(x).square().mean()
        loss.backward()
        self.optimizer.step()
        self.scheduler.step()
        return loss.item()


def test_a_scheduler_of_an_object():
    eager, lazy = Trainer(), Trainer()
    replayed = replay(lazy.step, check_every=0)
    for _ in range(2 * N):
        x = torch.randn(3, 4)
        assert replayed(x) == eager.step(x)
    assert torch.equal(lazy.model.weight, eager.model.weight)
    assert replayed.n_replayed >= N, replayed.obstacle


class Halves:
    factor = 1.0

    def __call__(self, epoch):
        return self.factor


@pytest.mark.parametrize("kind", ["a function", "an object", "a class"])
def test_a_schedule_that_depends_on_what_the_call_changes(kind):
    """It is recorded, as what the scheduler's code reads isn't followed."""

    def made():
        _, optimizer = of_one_parameter(0.1)
        halves = Halves()
        scheduler = {
            "a class": lambda: Halving(optimizer, halves),
            "an object": lambda: optim.lr_scheduler.LambdaLR(optimizer, halves),
            "a function": lambda: optim.lr_scheduler.LambdaLR(optimizer, lambda _: halves.factor),
        }[kind]()

        def step(x):
            optimizer.step()
            scheduler.step()
            halves.factor *= 0.9
            return x * 2

        return step, optimizer

    (eager, theirs), (lazy, mine) = made(), made()
    replayed = replay(lazy, check_every=0)
    for _ in range(N):
        eager(torch.ones(2))
        replayed(torch.ones(2))
        assert mine.param_groups[0]["lr"] == theirs.param_groups[0]["lr"]
        assert type(mine.param_groups[0]["lr"]) is float


class Halving(optim.lr_scheduler.LRScheduler):
    def __init__(self, optimizer, halves):
        self.halves = halves
        super().__init__(optimizer)

    def get_lr(self):
        return [base * self.halves.factor for base in self.base_lrs]


@pytest.mark.parametrize("schedule", SCHEDULERS)
@pytest.mark.parametrize("name", ["adam", "sgd"])
def test_a_scheduler_may_step_inside(name, schedule):
    make = {"adam": COUNTING["adam"], "sgd": lambda p: optim.SGD(p, lr=0.1, momentum=0.9)}[name]
    (eager, theirs, _), (step, mine, scheduler) = [scheduled(schedule, make) for _ in range(2)]
    replayed = replay(step, check_every=N)
    for _ in range(3 * N):
        x = torch.randn(3, 4)
        assert replayed(x) == eager(x)
        assert mine.param_groups[0]["lr"] == theirs.param_groups[0]["lr"]
    assert "step" not in vars(scheduler)
    assert replayed.n_replayed >= N, replayed.obstacle


def another_step(optimizer, scheduler):
    optimizer.step()


def the_rate(optimizer, scheduler):
    return scheduler.get_last_lr()


def the_epoch(optimizer, scheduler):
    return scheduler.last_epoch // 10


def another_rate(optimizer, scheduler):
    optimizer.param_groups[0]["lr"] *= 0.5


def an_epoch(optimizer, scheduler):
    scheduler.step(3)


@pytest.mark.parametrize("then", [another_step, the_rate, the_epoch, another_rate, an_epoch])
@pytest.mark.parametrize("schedule", ["every step", "now and then"])
@pytest.mark.filterwarnings("ignore:The epoch parameter")
def test_what_looks_at_a_scheduler_is_eagers(then, schedule):
    """Such calls may be recorded each time; what they do is the same."""
    make = COUNTING["adam"]
    (eager, theirs, _), (step, mine, _) = [scheduled(schedule, make, then) for _ in range(2)]
    replayed = replay(step)
    for _ in range(N):
        x = torch.randn(3, 4)
        assert replayed(x) == eager(x)
        assert mine.param_groups[0]["lr"] == theirs.param_groups[0]["lr"]


def test_a_rate_that_is_returned_is_that_of_the_call():
    _, optimizer = of_one_parameter(0.5)

    def step():
        optimizer.step()
        rate = optimizer.param_groups[0]["lr"]
        return {"rate": rate, "half": rate / 2, "again": rate}

    repeated, rate = replay(step), 0.5
    for i in range(4 * N):
        optimizer.param_groups[0]["lr"] = rate
        found = repeated()
        assert found == {"rate": rate, "half": rate / 2, "again": rate}
        assert {type(number) for number in found.values()} == {float}
        if i < N // 4:
            rate *= 0.9
    assert repeated.n_replayed > 0, repeated.obstacle


def test_a_rate_that_the_call_changes_is_put_back_changed():
    _, optimizer = of_one_parameter(0.5)

    def step():
        optimizer.step()
        optimizer.param_groups[0]["lr"] *= 0.5

    repeated = replay(step)
    for i in range(8):
        repeated()
        assert repr(optimizer.param_groups[0]["lr"]) == repr(0.5 ** (i + 2))
    assert repeated.n_replayed > 0


def test_rates_are_left_alone_where_the_program_looks_at_them():
    parameter = nn.Parameter(torch.ones(3))
    optimizer = optim.SGD([parameter], lr=1.0)

    def step():
        optimizer.step()
        with torch.no_grad():
            parameter.add_(1.0 if math.isclose(optimizer.param_groups[0]["lr"], 0.5) else -1.0)

    repeated, expected = replay(step), 1.0
    for i in range(N):
        optimizer.param_groups[0]["lr"] = rate = 1 - i / N
        repeated()
        expected += 1.0 if rate == 0.5 else -1.0
        assert lazy_tensor.materialize(parameter.detach())[0] == expected
        assert type(optimizer.param_groups[0]["lr"]) is float


@pytest.mark.parametrize("follows_until", range(4, 12))
def test_a_number_that_follows_the_rate_for_a_while_is_not_taken_for_it(follows_until):
    given = types.SimpleNamespace(scale=1.0)
    parameter = nn.Parameter(torch.zeros(3, dtype=torch.float64))
    parameter.grad = torch.zeros_like(parameter)
    optimizer = optim.SGD([parameter], lr=1.0)

    def step():
        optimizer.step()
        with torch.no_grad():
            parameter.add_(1.0, alpha=given.scale)

    repeated, expected = replay(step), 0.0
    for i in range(60):
        optimizer.param_groups[0]["lr"] = 1 / (i + 1)
        given.scale = max(1 / (i + 1), 1 / follows_until)
        repeated()
        expected += given.scale
        assert lazy_tensor.materialize(parameter.detach())[0] == expected
    assert repeated.n_replayed > 0, repeated.obstacle


def test_a_step_that_raises_gives_the_rate_back():
    parameter = nn.Parameter(torch.ones(3))
    optimizer = optim.SGD([parameter], lr=0.5)

    class Interrupted(Exception):
        pass

    def closure():
        raise Interrupted

    repeated = replay(lambda: optimizer.step(closure), warmup=0)
    with pytest.raises(Interrupted):
        repeated()
    assert type(optimizer.param_groups[0]["lr"]) is float
    assert not optimizer._optimizer_step_pre_hooks


def test_what_writes_two_tensors_is_not_run_for_its_count():
    parameter = nn.Parameter(torch.ones(3))
    parameter.grad = torch.ones(3)
    optimizer = optim.Adam([parameter], foreach=False)
    scale, found = torch.tensor(4.0), torch.tensor(0.0)
    tracker = torch.tensor(0, dtype=torch.int32)

    def step():
        torch._amp_update_scale_(scale, tracker, found, 2.0, 0.5, 100)
        optimizer.step()

    repeated = replay(step)
    for i in range(N):
        repeated()
        assert lazy_tensor.materialize(tracker) == i + 1
    assert repeated.n_replayed > 0, repeated.obstacle


@pytest.mark.parametrize("name", ["sgd", "adamw", "adam foreach"])
def test_a_rate_that_is_again_what_it_was_passes_checks(name):
    others = {"sgd": lambda p: optim.SGD(p, lr=0.1), "adamw": optim.AdamW}
    pair = Pair((COUNTING | others)[name], lambda step: replay(step, check_every=4))
    first = pair.optimizers[0].param_groups[0]["lr"]
    for rate in [first] * 6 + [first / 2, first * 2] * 4 + [first] * N:
        for optimizer in pair.optimizers:
            optimizer.param_groups[0]["lr"] = rate
        pair.take()
    assert pair.n_replayed >= N // 2, pair.step.obstacle
