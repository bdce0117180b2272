"""Calls that put a tensor where another one lay: two time steps of a simulation, for example."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from lazy_tensor import replay

pytestmark = pytest.mark.usefixtures("quiet")

Program = Callable[[], tuple[Callable[[], Any], Callable[[], list[torch.Tensor]]]]


def numbers(seed: int) -> torch.Tensor:
    return torch.rand(5, 4, generator=torch.Generator().manual_seed(seed))


def in_a_list() -> Any:
    held: list[torch.Tensor] = [numbers(0), numbers(1)]

    def step() -> torch.Tensor:
        before, now = held
        held[:] = [now, 1.9 * now - 0.95 * before]
        return now.sum()

    return step, lambda: held


def in_attributes() -> Any:
    it = SimpleNamespace(before=numbers(0), now=numbers(1))

    def step() -> Any:
        it.before, it.now = it.now, 1.9 * it.now - 0.95 * it.before
        return it.before + 0

    return step, lambda: [it.before, it.now]


def in_a_row_of_three() -> Any:
    held = {i: numbers(i) for i in range(3)}

    def step() -> torch.Tensor:
        held[0], held[1], held[2] = held[1], held[2], held[2] * 0.9 + held[0] * 0.1
        return held[2].mean()

    return step, lambda: list(held.values())


def swapped() -> Any:
    held = [numbers(0), numbers(1)]

    def step() -> torch.Tensor:
        held[0], held[1] = held[1], held[0]
        return held[0] * 2

    return step, lambda: held


def written_and_moved() -> Any:
    held = [numbers(0), numbers(1)]

    def step() -> torch.Tensor:
        held[1].mul_(0.5)
        held[0], held[1] = held[1], held[0] + 1
        return held[0].sum()

    return step, lambda: held


def moved_unread() -> Any:
    held = [numbers(0), numbers(1)]

    def step() -> torch.Tensor:
        held[0], held[1] = held[1], held[0] * 0 + 7
        return held[1].sum()

    return step, lambda: held


@pytest.mark.parametrize(
    "program",
    [in_a_list, in_attributes, in_a_row_of_three, swapped, written_and_moved, moved_unread],
)
@pytest.mark.parametrize("is_held", [False, True])
def test_moved_tensors_equal_eagers(program: Program, is_held: bool) -> None:
    step, now = program()
    expected_step, expected_now = program()
    replayed = replay(step)
    held, expected_held = [], []
    for _ in range(9):
        torch.testing.assert_close(replayed(), expected_step())
        torch.testing.assert_close([one.clone() for one in now()], expected_now())
        if is_held:  # the program keeps what lay there: it must not change
            held += now()
            expected_held += expected_now()
    torch.testing.assert_close([one.clone() for one in held], expected_held)
    assert replayed.n_replayed >= 4, replayed.obstacle


def recurrence() -> Any:
    """A state that begins a sequence as the same object as its start."""
    it = SimpleNamespace(start=numbers(0), weight=numbers(1))

    def step(x: torch.Tensor) -> Any:
        it.state = torch.tanh(it.state * 0.5 + it.weight)
        return (it.state - it.start).sum()

    def begin() -> None:
        it.state = it.start

    return step, begin


def leapfrog() -> Any:
    """A simulation that begins with one tensor as both of its time steps."""
    it = SimpleNamespace()

    def step(x: torch.Tensor) -> Any:
        it.before, it.now = it.now, 1.9 * it.now - 0.95 * it.before
        return it.now.sum()

    def begin() -> None:
        it.now = it.before = numbers(0)

    return step, begin


@pytest.mark.parametrize("program", [recurrence, leapfrog])
@pytest.mark.parametrize("length", [2, 3, 5])
def test_a_start_that_makes_two_places_one_object_is_noticed(program: Any, length: int) -> None:
    (step, begin), (expected_step, expected_begin) = program(), program()
    replayed = replay(step)
    x = torch.zeros(1)
    for _ in range(12):
        begin()
        expected_begin()
        for _ in range(length):
            torch.testing.assert_close(replayed(x), expected_step(x))
    assert replayed.n_replayed or length == 2


def test_an_error_leaves_a_tensor_where_its_successor_is_lost() -> None:
    it = SimpleNamespace(before=numbers(0), now=numbers(1), count=torch.zeros(()))

    def step(index: torch.Tensor) -> None:
        following = (it.before + it.now).gather(0, index)
        it.count = it.count + 1
        it.before, it.now = it.now, following

    replayed = replay(step)
    for _ in range(6):
        replayed(torch.zeros(5, 4, dtype=torch.long))
    assert replayed.n_replayed
    before, now, count = it.before.clone(), it.now.clone(), float(it.count)
    with pytest.raises((IndexError, RuntimeError), match="out of (range|bounds)"):
        replayed(torch.full((5, 4), 9))
    torch.testing.assert_close([it.before.clone(), it.now.clone()], [before, now])
    assert float(it.count) == count + 1


def test_which_tensors_are_one_and_the_same_is_eagers() -> None:
    held = [numbers(0), numbers(1)]

    def step() -> None:
        held[0], held[1] = held[1], held[1] + held[0]

    replayed = replay(step)
    for _ in range(8):
        (_, second) = held
        replayed()
        assert held[0] is second
        assert held[1] is not second
    assert replayed.n_replayed


def test_a_tensor_that_comes_to_lie_at_two_places_is_an_obstacle() -> None:
    held = [numbers(0), numbers(1)]

    def step() -> torch.Tensor:
        held[0] = held[1]
        held[1].add_(1)
        return held[0].sum()

    replayed = replay(step)
    for i in range(6):
        torch.testing.assert_close(replayed(), (numbers(1) + (i + 1)).sum())
    assert held[0] is held[1]
