"""The programs of `examples/`, in short."""

from __future__ import annotations

import math
import os
import re
import statistics
import subprocess
import sys
from dataclasses import replace
from itertools import islice
from pathlib import Path

import pytest
import torch

from lazy_tensor import lazy_mode, replay
from lazy_tensor.examples import gpt, gray_scott, monte_carlo

EXAMPLES = Path(__file__).parents[1] / "examples"
TINY = gpt.SIZES["tiny"]


def test_gray_scott_draws_the_same_pattern_lazily():
    eager = lazy = replayed = gray_scott.start(64, 64)
    again = replay(gray_scott.step)
    for _ in range(100):
        eager, replayed = gray_scott.step(*eager), again(*replayed)
        with lazy_mode(compile="off"):
            lazy = gray_scott.step(*lazy)
    for one, two, three in zip(eager, lazy, replayed, strict=True):
        assert torch.equal(one, two)
        torch.testing.assert_close(one, three)
    assert 0 < eager[1].min() < eager[1].max() < 1  # the substance has spread


def test_monte_carlo_draws_the_same_numbers_lazily():
    def prices(mode):
        torch.manual_seed(0)
        found = []
        for _ in range(5):
            with mode:
                found.append(monte_carlo.price(1000).item())
        return found

    assert prices(lazy_mode(compile="off")) == prices(torch.enable_grad())


def test_monte_carlo_price_of_one_date_is_black_and_scholes():
    spot, strike, rate, years = (
        monte_carlo.SPOT, monte_carlo.STRIKE, monte_carlo.RATE, monte_carlo.YEARS
    )  # fmt: skip
    deviation = monte_carlo.VOLATILITY * math.sqrt(years)
    d = (math.log(spot / strike) + rate * years) / deviation + deviation / 2
    share, cash = statistics.NormalDist().cdf(d), statistics.NormalDist().cdf(d - deviation)
    expected = spot * share - strike * math.exp(-rate * years) * cash
    assert monte_carlo.price(4_000_000, n_dates=1).item() == pytest.approx(expected, abs=0.03)


def test_gpt_is_causal():
    model = gpt.GPT(TINY)
    tokens = torch.zeros(3, TINY.context, dtype=torch.int64)
    changed = tokens.clone()
    changed[0, 10:] = 65
    assert model(tokens).shape == (3, TINY.context, 256)
    torch.testing.assert_close(model(tokens)[:, :10], model(changed)[:, :10])


@pytest.mark.parametrize("tied", [True, False])
def test_head_is_tied_if_asked(tied):
    model = gpt.GPT(replace(TINY, tied=tied))
    assert (model.head.weight is model.token_embedding.weight) == tied


def test_gpt_learns():
    model = gpt.GPT(TINY)
    train = gpt.train_step(model, torch.optim.AdamW(model.parameters(), lr=3e-3))
    tokens, targets = next(gpt.batches(gpt.library_text(), 4, TINY.context))
    losses = [train(tokens, targets).item() for _ in range(20)]
    assert losses[-1] < losses[0] - 0.3


def test_text_is_python_source_within_the_cap():
    text = gpt.library_text()
    assert text.dtype == torch.uint8
    assert 1_000_000 < len(text) <= gpt.MAX_BYTES
    assert b"import " in bytes(text[:100_000].tolist())


def test_batches_depend_on_their_seed_alone():
    text = torch.arange(200, dtype=torch.uint8)

    def drawn(seed):
        return [tokens.tolist() for tokens, _ in islice(gpt.batches(text, 4, 8, seed), 3)]

    torch.manual_seed(0)
    state = torch.get_rng_state()
    first = drawn(1)
    assert torch.equal(torch.get_rng_state(), state)
    torch.manual_seed(2)
    assert drawn(1) == first
    assert drawn(3) != first


def test_targets_are_the_next_bytes():
    text = torch.tensor([7, 8, 9], dtype=torch.uint8)
    tokens, targets = next(gpt.batches(text, batch=2, context=2))
    assert tokens.tolist() == [[7, 8]] * 2
    assert targets.tolist() == [[8, 9]] * 2
    assert tokens.dtype == targets.dtype == torch.int64


def test_race_of_the_gpt_has_equal_losses():
    arguments = ["--size", "tiny", "--steps", "4", "--batch", "2"]
    done = subprocess.run(
        [sys.executable, EXAMPLES / "train_gpt.py", *arguments], capture_output=True, text=True,
        check=True, env=os.environ | {"LAZY_TENSOR_COMPILE": "off"},
    )  # fmt: skip
    *_, eager, lazy, replayed = done.stdout.splitlines()
    assert eager.startswith("eager")
    for row in (lazy, replayed):
        assert re.search(r" 0\.0e\+00$", row), done.stdout
    assert done.stderr == ""
