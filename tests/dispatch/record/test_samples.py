"""Random ops that take tensors: the same numbers as in eager, recorded, and replayed."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

import lazy_tensor
from lazy_tensor import lazy_mode, replay

SAMPLES: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "bernoulli": torch.bernoulli,
    "bernoulli of a transposed one": lambda p: torch.bernoulli(p.T),
    "multinomial": lambda p: torch.multinomial(p, 1),
    "multinomial with replacement": lambda p: torch.multinomial(p, 1, True),
    "multinomial of a row": lambda p: torch.multinomial(p[0], 1),
    "normal": lambda p: torch.normal(p - 0.5, p),
    "normal of several means": lambda p: torch.normal(p, 0.25),
    "normal of a deviation that is the default": lambda p: torch.normal(p, 1.0),
    "normal of several deviations": lambda p: torch.normal(2.0, p),
    "normal of a row and a column": lambda p: torch.normal(p[:, :1], p[:1]),
    "Categorical": lambda p: torch.distributions.Categorical(p).sample(),
    "Bernoulli": lambda p: torch.distributions.Bernoulli(p).sample(),
    "Normal": lambda p: torch.distributions.Normal(p, 0.5 + p).sample(),
}


@pytest.fixture(params=[torch.float32, torch.float64], ids=str)
def chances(request: pytest.FixtureRequest) -> torch.Tensor:
    chances: torch.Tensor = torch.rand(37, 9, dtype=request.param)
    return chances


@pytest.mark.parametrize("name", SAMPLES)
def test_samples_are_eagers_and_recorded(name: str, chances: torch.Tensor) -> None:
    torch.manual_seed(0)
    expected = [SAMPLES[name](chances * 1.0) for _ in range(3)]
    after = torch.rand(2)
    torch.manual_seed(0)
    for one in expected:
        with lazy_mode(record="always"):
            sample = SAMPLES[name](chances * 1.0)
            assert lazy_tensor.is_pending(sample)
        assert torch.equal(sample, one)
        assert sample.stride() == one.stride()
        assert sample.dtype is one.dtype
    assert torch.equal(torch.rand(2), after)


@pytest.mark.parametrize("name", SAMPLES)
def test_samples_are_replayed(name: str, chances: torch.Tensor) -> None:
    torch.manual_seed(0)
    expected = [SAMPLES[name](chances * i) for i in torch.linspace(0.1, 1, 12)]
    step = replay(SAMPLES[name])
    torch.manual_seed(0)
    for i, one in zip(torch.linspace(0.1, 1, 12), expected, strict=True):
        assert torch.equal(step(chances * i), one)
    assert step.n_replayed > 6


@pytest.mark.parametrize(
    ("sample", "wrong", "message"),
    [
        (torch.bernoulli, [0.5, 1.5], "Expected p_in >= 0 && p_in <= 1"),
        (torch.bernoulli, [0.5, float("nan")], "Expected p_in >= 0 && p_in <= 1"),
        (lambda p: torch.multinomial(p, 1), [0.5, -0.5], "element < 0"),
        (lambda p: torch.multinomial(p, 1), [0.5, float("inf")], "element < 0"),
        (lambda p: torch.multinomial(p, 1), [0.0, 0.0], "sum of probabilities <= 0"),
        (lambda p: torch.normal(0.0, p), [1.0, -1.0], "std >= 0.0"),
    ],
)
def test_wrong_values_raise_when_they_are_computed(
    sample: Callable[[torch.Tensor], torch.Tensor], wrong: list[float], message: str
) -> None:
    with pytest.raises(RuntimeError, match=message):
        sample(torch.tensor(wrong))
    for _ in range(2):
        with pytest.raises(RuntimeError, match=message), lazy_mode(record="always"):
            kept = sample(torch.tensor(wrong) * 1.0)
        del kept


@pytest.mark.parametrize("n_samples", [0, 3])
def test_several_samples_are_drawn_at_once(n_samples: int) -> None:
    """What runs at once does so, and raises as ever."""
    chances = torch.rand(4, 9)
    if n_samples == 0:
        with pytest.raises(RuntimeError, match="0 samples"), lazy_mode(record="always"):
            torch.multinomial(chances, n_samples)
        return
    torch.manual_seed(0)
    expected = torch.multinomial(chances, n_samples)
    torch.manual_seed(0)
    with lazy_mode(record="always"):
        sample = torch.multinomial(chances, n_samples)
    assert torch.equal(sample, expected)
