"""Models and optimizers converted in the middle of training, in each state of the policy.

Parameters, gradients, buffers and optimizer state may each be lazy or plain by then. What training
gives after each conversion is compared with eager, bit for bit.
"""

from __future__ import annotations

import copy
import io
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch

from lazy_tensor import configure, is_lazy, materialize, unwrap, wrap
from lazy_tensor.dispatch.run import hits
from lazy_tensor.dispatch.tiering import policy
from tests.invariants.compare import assert_same


class Model(torch.nn.Module):
    """An embedding with a sparse gradient, if wanted, a buffer that changes, and two layers."""

    def __init__(self, sparse: bool):
        super().__init__()
        self.embedding = torch.nn.Embedding(7, 4, sparse=sparse)
        self.norm = torch.nn.BatchNorm1d(4)
        self.out = torch.nn.Linear(4, 1)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        made: torch.Tensor = self.out(torch.tanh(self.norm(self.embedding(tokens))))
        return made


Optimizers = list[torch.optim.Optimizer]


def dense(kind: Any, **options: Any) -> Callable[[Model], Optimizers]:
    return lambda model: [kind(model.parameters(), **options)]


def sparse(model: Model) -> Optimizers:
    return [
        torch.optim.SparseAdam(list(model.embedding.parameters()), lr=0.01),
        torch.optim.SGD([*model.norm.parameters(), *model.out.parameters()], lr=0.01),
    ]


OPTIMIZERS = {
    "SGD": dense(torch.optim.SGD, lr=0.01),
    "momentum": dense(torch.optim.SGD, lr=0.01, momentum=0.9),
    "Adam": dense(torch.optim.Adam, lr=0.01),
    "AdamW foreach": dense(torch.optim.AdamW, lr=0.01, foreach=True),
    "SparseAdam": sparse,
}


def train(both: Any, n_steps: int, seed: int) -> list[float]:
    """Losses of so many steps of a model and its optimizers, each read at its step."""
    model, optimizers, _ = both
    generator = torch.Generator().manual_seed(seed)
    losses = []
    for _ in range(n_steps):
        tokens = torch.randint(0, 7, (8,), generator=generator)
        for optimizer in optimizers:
            optimizer.zero_grad()
        loss = model(tokens).square().mean()
        loss.backward()
        for optimizer in optimizers:
            optimizer.step()
        losses.append(loss.item())
    return losses


def state_of(both: Any) -> Any:
    """All values: parameters, buffers, gradients, optimizer state."""
    model, optimizers, _ = both
    grads = [
        None if p.grad is None else p.grad.to_dense() if p.grad.is_sparse else p.grad
        for p in model.parameters()
    ]
    tensors = (dict(model.state_dict()), grads, [o.state_dict()["state"] for o in optimizers])
    return materialize(tensors)


def saved(x: Any) -> Any:
    file = io.BytesIO()
    torch.save(x, file)
    file.seek(0)
    return torch.load(file, weights_only=False)


def rebuilt(both: Any) -> Any:
    """The model and optimizers made anew, their state loaded."""
    model, optimizers, make = both
    new = Model(model.embedding.sparse)
    new.load_state_dict(model.state_dict())
    made = make(new)
    for old, optimizer in zip(optimizers, made, strict=True):
        optimizer.load_state_dict(old.state_dict())
    return new, made, make


def remade(both: Any, dtype: torch.dtype) -> Any:
    """The model in another dtype; optimizers made anew, as eager refuses the old ones' state."""
    model, _, make = both
    return model.to(dtype), make(model), make


def shared(model: Model) -> None:
    """Share the model's memory with other processes; eager refuses that with sparse gradients."""
    model.zero_grad()
    model.share_memory()


def on(convert: Callable[[Model], Any]) -> Callable[[Any], Any]:
    """A conversion of the model in place, the optimizers as they are."""

    def converted(both: Any) -> Any:
        convert(both[0])
        return both

    return converted


COPIES: dict[str, Callable[[Any], Any]] = {
    "copy.deepcopy": lambda both: (*copy.deepcopy(both[:2]), both[2]),
    "pickle": lambda both: (*pickle.loads(pickle.dumps(both[:2])), both[2]),
    "torch.save": lambda both: (*saved(both[:2]), both[2]),
    "load_state_dict": rebuilt,
}
IN_PLACE: dict[str, Callable[[Any], Any]] = {
    "copy.copy": on(lambda model: copy.copy(model)(torch.tensor([1, 2]))),
    "wrap again": on(wrap),
    "unwrap": on(unwrap),
    "wrap": on(wrap),
    "to double": lambda both: remade(both, torch.float64),
    "to float": lambda both: remade(both, torch.float32),
    "unwrap twice": on(lambda model: unwrap(unwrap(model))),
    "share_memory": on(shared),
}


def in_policy(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Hold the policy in one of its states."""
    monkeypatch.setattr(policy, "FIRST_CALLS", 256)
    configure(warn=False)  # that what is held so repeats itself too little
    if name == "always":
        configure(record="always")
    elif name == "cold":
        monkeypatch.setattr(policy.Policy, "may_grow", lambda self: False)
    elif name == "asleep":
        monkeypatch.setattr(policy.Policy, "begin_round", lambda self, **options: False)


STATES = ["always", "default", "cold", "asleep"]
CASES = [
    pytest.param(
        state,
        name,
        n,
        marks=[] if n <= 100 or state == "default" and n == 1000 else pytest.mark.full,
    )
    for state in STATES
    for name in OPTIMIZERS
    for n in (10, 100, 1000, 3000)
]


@pytest.mark.parametrize(("state", "name", "n_steps"), CASES)
def test_training_goes_on_after_each_conversion(state, name, n_steps, monkeypatch):
    if state == "asleep" and hits.native is None:
        pytest.skip("no thread sleeps without the C++ recorder")
    in_policy(state, monkeypatch)
    make = OPTIMIZERS[name]
    expected: Any = Model(sparse=name == "SparseAdam")
    expected = (expected, make(expected), make)
    model = copy.deepcopy(expected[0])
    got: Any = (wrap(model), make(model), make)
    losses = train(expected, n_steps, seed=0)
    assert train(got, n_steps, seed=0) == losses
    for n, (how, conversion) in enumerate((COPIES | IN_PLACE).items()):
        after = conversion(got)
        after_eager = expected if "wrap" in how else conversion(expected)
        assert train(after, 3, seed=n + 1) == train(after_eager, 3, seed=n + 1), how
        assert_same(state_of(after), state_of(after_eager))
    unwrap(got[0])
    assert not any(map(is_lazy, [*got[0].parameters(), *got[0].buffers()]))
    assert not any(is_lazy(p.grad) for p in got[0].parameters())
