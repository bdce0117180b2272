"""Lazy tensors that ops pass by while their thread is asleep: they stay what they are in eager."""

import random
import threading
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import nn

import lazy_tensor
from lazy_tensor.dispatch.run import hits
from lazy_tensor.dispatch.tiering.policy import ASLEEP, Policy
from lazy_tensor.dispatch.trie import memory_sharing
from lazy_tensor.dispatch.trie.trace import local


@pytest.fixture(autouse=True)
def wrapped(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    if hits.native is None:
        pytest.skip(hits.status())
    monkeypatch.setattr(Policy, "has_wrapped", True)
    local.trace.policy.reset()
    yield
    lazy_tensor.flush()
    local.trace.policy.reset()


def sleep() -> None:
    lazy_tensor.flush()
    local.trace.policy.cold = ASLEEP


def wake() -> None:
    local.trace.policy.cold = 0


def is_passed_by(tensor: torch.Tensor) -> bool:
    return lazy_tensor.is_lazy(tensor) and not torch._C._dispatch_keys(tensor).has("Python")


def test_ops_pass_a_tensor_until_the_thread_wakes() -> None:
    x = lazy_tensor.wrap(torch.ones(3))
    sleep()
    assert not is_passed_by(x)
    assert type(x * 2) is torch.Tensor
    assert is_passed_by(x)
    x.add_(1)
    assert x.tolist() == [2.0, 2.0, 2.0]
    wake()
    assert not is_passed_by(x)
    y = x * 2
    x.mul_(3)
    assert lazy_tensor.is_pending(x)
    assert (y.tolist(), x.tolist()) == ([4.0] * 3, [6.0] * 3)


def test_an_update_doesnt_wait_while_a_plain_view_lives() -> None:
    x = lazy_tensor.wrap(torch.arange(6.0).reshape(2, 3))
    sleep()
    x.sum()
    part = x[0]
    assert type(part) is torch.Tensor
    wake()
    x.mul_(2)
    assert part.tolist() == [0.0, 2.0, 4.0]  # nobody sees this read
    del part
    x.mul_(2)
    assert lazy_tensor.is_pending(x)


def test_what_changes_the_tensor_itself_stays() -> None:
    x, y = (lazy_tensor.wrap(torch.arange(6.0).reshape(2, 3)) for _ in range(2))
    sleep()
    for tensor in (x, y):
        tensor.sum()
    x.t_()
    y.set_(torch.arange(4.0))  # type: ignore[call-overload]
    assert (x.tolist(), y.tolist()) == ([[0.0, 3.0], [1.0, 4.0], [2.0, 5.0]], [0.0, 1.0, 2.0, 3.0])
    wake()
    assert (x + 1).tolist() == [[1.0, 4.0], [2.0, 5.0], [3.0, 6.0]]
    assert (y + 1).tolist() == [1.0, 2.0, 3.0, 4.0]


def passed_with_alias() -> tuple[torch.Tensor, torch.Tensor]:
    """A lazy tensor that ops pass by, as the thread is asleep, and one on its memory."""
    x = lazy_tensor.wrap(torch.zeros(3))
    alias = x.detach()
    x.add_(0)
    sleep()
    x.sum()
    assert is_passed_by(x)
    assert not is_passed_by(alias)
    return x, alias


LEAVES: dict[str, Callable[[list[torch.Tensor]], Any]] = {
    "it is dropped": lambda tensors: tensors.clear(),
    "its data are set": lambda tensors: setattr(tensors[0], "data", torch.zeros(3)),
    "its memory is set": lambda tensors: tensors[0].set_(torch.zeros(3)),  # type: ignore[call-overload]
}


@pytest.mark.parametrize("leave", LEAVES.values(), ids=LEAVES)
def test_a_plain_alias_outlives_the_tensor_on_its_memory(leave: Callable[[Any], Any]) -> None:
    x, alias = passed_with_alias()
    plain, tensors = x.data, [x]
    assert type(plain) is torch.Tensor
    del x
    leave(tensors)
    wake()
    alias.add_(1)
    assert plain.tolist() == [1.0] * 3
    twice = alias * 2
    plain.add_(1)
    assert twice.tolist() == [2.0] * 3


def test_an_op_of_a_finalizer_may_come_while_the_thread_wakes(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    x, alias = passed_with_alias()
    n_others = memory_sharing._n_others

    def finalized(tensor: torch.Tensor) -> int:
        x.sum()
        return n_others(tensor)

    monkeypatch.setattr(memory_sharing, "_n_others", finalized)
    wake()
    assert not is_passed_by(x)
    alias.add_(1)
    assert x.sum().item() == 3


def test_an_interrupt_while_the_thread_wakes(monkeypatch: pytest.MonkeyPatch) -> None:
    pairs = [passed_with_alias() for _ in range(3)]
    sleep()
    for x, _ in pairs:
        x.sum()

    def interrupt(_: torch.Tensor) -> int:
        monkeypatch.undo()
        monkeypatch.setattr(Policy, "has_wrapped", True)
        raise KeyboardInterrupt

    monkeypatch.setattr(memory_sharing, "_n_others", interrupt)
    with pytest.raises(KeyboardInterrupt):
        wake()
    wake()
    for _, alias in pairs:
        alias.add_(1)
    assert [x.sum().item() for x, _ in pairs] == [3.0] * 3


def test_plain_aliases_are_known_whatever_memory_the_others_have() -> None:
    x, alias = passed_with_alias()
    alias.sum()
    x.set_(torch.zeros(3))  # type: ignore[call-overload]
    plain = alias.data
    wake()
    alias.add_(2)
    assert plain.tolist() == [2.0] * 3


def test_memory_goes_with_the_value() -> None:
    x, alias = passed_with_alias()
    storage = weakref.ref(x.untyped_storage())
    x.data = torch.ones(3)
    del alias
    wake()
    assert storage() is None
    assert (x + 1).tolist() == [2.0] * 3


def test_writes_are_counted_once() -> None:
    x = lazy_tensor.wrap(torch.ones(2, 3))
    sleep()
    x.sum()
    x.t_()
    wake()
    sleep()
    before = x._version
    x.add_(1)
    assert x._version == before + 1


def test_an_op_whose_own_copy_lets_it_pass() -> None:
    """Autograd copies what `mul_` writes, by an op within `mul_`."""
    x, factor = lazy_tensor.wrap(torch.ones(2)), torch.tensor([2.0, 3.0], requires_grad=True)
    sleep()
    x.mul_(factor)
    assert x.tolist() == [2.0, 3.0]
    x.sum().backward()
    assert factor.grad is not None
    assert factor.grad.tolist() == [1.0, 1.0]


def test_a_parameter_is_made_of_a_tensor_that_ops_pass_by() -> None:
    x = lazy_tensor.wrap(torch.ones(3))
    sleep()
    x.sum()
    assert is_passed_by(x)
    parameter = nn.Parameter(x)
    assert isinstance(parameter, nn.Parameter)
    assert lazy_tensor.is_lazy(parameter)
    parameter.data.mul_(2)
    assert x.tolist() == [2.0] * 3


def test_a_model_is_unwrapped_while_ops_pass_it_by() -> None:
    model = lazy_tensor.wrap(nn.Linear(2, 2))
    sleep()
    expected = model(torch.ones(2)).tolist()
    assert all(map(is_passed_by, model.parameters()))
    lazy_tensor.unwrap(model)
    assert {type(p) for p in model.parameters()} == {nn.Parameter}
    assert model(torch.ones(2)).tolist() == expected


def test_nothing_passes_while_another_thread_records() -> None:
    x = lazy_tensor.wrap(torch.ones(3))
    sleep()
    x.sum()
    assert is_passed_by(x)
    began, ends = threading.Event(), threading.Event()
    seen: list[Any] = []

    def record() -> None:
        with lazy_tensor.lazy_mode(record="always"):
            seen.append(torch.ones(2) + 1)
        seen.append(is_passed_by(x))
        began.set()
        ends.wait()

    thread = threading.Thread(target=record)
    thread.start()
    began.wait()
    x.sum()
    try:
        assert seen[1:] == [False]
        assert not is_passed_by(x)
    finally:
        ends.set()
        thread.join()


OPS: dict[str, Callable[[dict[str, torch.Tensor]], Any]] = {
    "view": lambda t: t.__setitem__("view", t["x"].t()),
    "write": lambda t: t["x"].add_(1),
    "write the view": lambda t: t["view"].mul_(0.5),
    "write a part": lambda t: t["x"][0].zero_(),
    "transpose": lambda t: t["x"].t_(),
    "copy": lambda t: t.__setitem__("copy", t["x"].clone()),
    "write the copy": lambda t: t["copy"].add_(t["x"]),
    "copy back": lambda t: t["x"].copy_(t["copy"]),
    "alias": lambda t: t.__setitem__("alias", t["x"].detach()),
    "write the alias": lambda t: t["alias"].sub_(2),
    "new data": lambda t: setattr(t["x"], "data", t["copy"].clone()),
    "out": lambda t: torch.mul(t["x"], 0.25, out=t["copy"]),
    "product": lambda t: t.__setitem__("copy", t["x"] @ t["x"] * 0.01),
    "drop": lambda t: t.update(view=t["copy"].clone(), alias=t["copy"].clone()),
    "read": lambda t: t["x"].sum().item(),
    "array": lambda t: float(t["x"].detach().numpy()[0, 0]),
    "write an array": lambda t: t["x"].detach().numpy().__imul__(0.5),
}


@pytest.mark.parametrize("seed", range(40))
def test_random_programs_are_eagers(seed: int) -> None:
    draw = random.Random(seed)
    names = [draw.choice([*OPS, "sleep", "wake"]) for _ in range(60)]
    start = torch.arange(9.0).reshape(3, 3)

    def run(wraps: bool) -> list[Any]:
        x = lazy_tensor.wrap(start.clone()) if wraps else start.clone()
        tensors = {"x": x, "view": x.t(), "copy": x.clone(), "alias": x.detach()}
        seen: list[Any] = []
        for name in names:
            if name not in OPS:
                if wraps:
                    sleep() if name == "sleep" else wake()
                continue
            found = OPS[name](tensors)
            seen.append(found if isinstance(found, float) else None)
        wake()
        return seen + [tensor.tolist() for tensor in tensors.values()]

    assert run(True) == run(False)


@pytest.mark.parametrize("optimizer", ["SGD", "Adam", "AdamW"])
def test_training_is_eagers(optimizer: str) -> None:
    def trained(wraps: bool) -> list[torch.Tensor]:
        torch.manual_seed(0)
        model: nn.Module = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Linear(8, 2))
        if wraps:
            lazy_tensor.wrap(model)
        optim = getattr(torch.optim, optimizer)(model.parameters(), lr=0.01)
        x = torch.randn(6, 4)
        old: list[torch.Tensor] = []
        for n in range(24):
            if wraps:
                sleep() if n % 8 in (3, 4, 5) else wake()
            loss = model(x).square().mean()
            if n % 8 == 5:
                old.append(loss)  # its graph outlives the sleep
            optim.zero_grad()
            (loss if n % 8 != 6 else loss + old[-1] * 0).backward(retain_graph=n % 8 == 5)
            if n % 8 != 5:
                optim.step()
        return [tensor.detach() for tensor in [*model.parameters(), *model.buffers()]]

    for mine, theirs in zip(trained(True), trained(False), strict=True):
        assert torch.equal(lazy_tensor.materialize(mine), theirs)
