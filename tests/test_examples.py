"""The programs of `examples/`, in short."""

from __future__ import annotations

import math
import os
import re
import statistics
import subprocess
import sys
from contextlib import nullcontext
from dataclasses import replace
from itertools import groupby, islice
from pathlib import Path

import pytest
import torch
import transformers

from lazy_tensor import lazy_mode, replay
from lazy_tensor.examples import (
    cnn,
    finetune,
    generate,
    gpt,
    gray_scott,
    monte_carlo,
    policy_gradient,
)

EXAMPLES = Path(__file__).parents[1] / "examples"
TINY = gpt.SIZES["tiny"]


def printed(name, *arguments):
    """What a program of `examples/` prints. No kernels are built, and nothing may go to stderr."""
    done = subprocess.run(
        [sys.executable, EXAMPLES / f"{name}.py", *arguments], capture_output=True, text=True,
        check=True, env=os.environ | {"LAZY_TENSOR_COMPILE": "off"},
    )  # fmt: skip
    assert done.stderr == ""
    return done.stdout


def without_numbers(text):
    """Its lines, each number as `#`; of neighbours that are equal then, one."""
    lines = [re.sub(r"\d[\d.]*", "#", line.strip()) for line in text.splitlines()]
    return [line for line, _ in groupby(line for line in lines if line not in ("", "..."))]


@pytest.mark.parametrize(
    ("program", "arguments"),
    [
        (cnn, "--steps 8 --batch 4"),
        (finetune, "--steps 6"),
        (generate, "--steps 2 --bytes 8"),
        (policy_gradient, "--updates 2 --carts 4 --steps 10"),
    ],
    ids=lambda value: "" if isinstance(value, str) else Path(value.__file__).stem,
)
def test_program_prints_what_its_docstring_says(program, arguments):
    _, expected = re.findall(r"^    .*\n(?:    .*\n)*", program.__doc__, flags=re.MULTILINE)
    lines = without_numbers(printed(Path(program.__file__).stem, *arguments.split()))
    assert lines[: len(without_numbers(expected))] == without_numbers(expected)


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
    table = printed("train_gpt", "--size", "tiny", "--steps", "4", "--batch", "2")
    *_, eager, lazy, replayed = table.splitlines()
    assert eager.startswith("eager")
    for row in (lazy, replayed):
        assert re.search(r" 0\.0e\+00$", row), table


def test_cnn_learns_the_same_lazily():
    def outcome(mode):
        torch.manual_seed(0)
        generator = torch.Generator().manual_seed(0)
        model = cnn.network(width=4)
        step = cnn.train_step(model, torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9))
        losses = []
        for _ in range(8):
            images, labels = cnn.draw(8, generator, size=12)
            with mode:
                loss = step(images, labels)
            losses.append(loss.item())
        with mode:
            return losses, cnn.accuracy(model, *cnn.draw(50, generator, size=12))

    assert outcome(lazy_mode(compile="off")) == outcome(nullcontext())


def test_shapes_are_drawn_in_equal_shares_and_within_the_image():
    images, labels = cnn.draw(300, torch.Generator().manual_seed(0), noise=0.0)
    assert images.shape == (300, 1, 24, 24)
    assert set(images.unique().tolist()) == {0, 1}
    assert labels.bincount().min() > 80
    assert images[..., 0].sum() == images[..., -1].sum() == 0
    circles, squares, crosses = (images[labels == i].mean().item() for i in range(cnn.N_SHAPES))
    assert crosses < circles < squares


@pytest.mark.filterwarnings("ignore:replay.*goes on recording")
def test_fine_tuning_has_the_same_losses_by_replay(tmp_path):
    def outcome(prepare):
        transformers.set_seed(0)
        model, tokenizer = finetune.small_bert()
        trainer = finetune.trainer_of(prepare(model), tokenizer, str(tmp_path), n_steps=6)
        trainer.train()
        losses = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
        assert len(losses) == 6
        return losses, trainer.evaluate()["eval_loss"]

    assert outcome(lambda model: replay(model, compile="off")) == outcome(lambda model: model)


def test_second_half_of_a_sentence_decides():
    tokenizer = finetune.small_bert()[1]
    rows = finetune.rows(200, tokenizer, seed=0)
    assert {len(row["input_ids"]) for row in rows} == {13}
    assert 60 < sum(row["labels"] for row in rows) < 140
    for row in rows:
        words = tokenizer.decode(row["input_ids"], skip_special_tokens=True).split()
        assert "[UNK]" not in words
        second = words[words.index("but") :]
        turned = "not" in second or "hardly" in second
        assert row["labels"] == ((second[-1] in finetune.GOOD) != turned)


def test_decoding_with_the_cache_expects_what_the_model_does():
    model = gpt.GPT(TINY)
    head_width = TINY.width // TINY.n_heads
    cache = torch.zeros(TINY.n_layers, 2, 1, TINY.n_heads, TINY.context, head_width)
    tokens = torch.randint(256, (1, TINY.context))
    with torch.no_grad():
        expected = model(tokens)[0]
        for i in range(TINY.context):
            logits = generate.logits_of(model, cache, tokens[:, i : i + 1], torch.tensor([i]))
            torch.testing.assert_close(logits, expected[i])


def test_generated_text_is_the_same_by_replay():
    model = gpt.GPT(TINY)

    def text(prepare):
        torch.manual_seed(0)
        return generate.write(prepare(generate.decode_step(model)), n_bytes=TINY.context)

    replayed = []

    def prepare(step):
        replayed.append(replay(step, compile="off"))
        return replayed[0]

    expected = text(lambda step: step)
    assert expected.startswith(generate.PROMPT)
    assert len(expected) == TINY.context
    assert text(prepare) == expected
    assert replayed[0].n_replayed > TINY.context // 2


def test_policy_learns_the_same_lazily():
    def outcome(prepare, mode):
        torch.manual_seed(0)
        policy = policy_gradient.network(width=8)
        optimizer = torch.optim.Adam(policy.parameters(), lr=1e-2)
        step = prepare(policy_gradient.step_of(policy))
        for _ in range(4):
            played = policy_gradient.episodes(step, n_carts=4, n_steps=20)
            with mode:
                policy_gradient.update(policy, optimizer, *played)
        return [*played, *(p.detach() for p in policy.parameters())]

    lazy = outcome(lambda step: replay(step, compile="off"), lazy_mode(compile="off"))
    eager = outcome(lambda step: step, nullcontext())
    for one, other in zip(lazy, eager, strict=True):
        assert torch.equal(one, other)


def test_pole_falls_as_an_inverted_pendulum_does():
    """Without a push, a small angle grows as `cosh(rate * time)`."""
    state = torch.tensor([[0.0, 0.0, 0.01, 0.0]])
    for _ in range(20):
        state = policy_gradient.move(state, torch.tensor([0.5]))  # neither to the left nor right
    length, pole = policy_gradient.HALF_LENGTH, policy_gradient.POLE_MASS
    mass = policy_gradient.CART_MASS + pole
    rate = math.sqrt(policy_gradient.GRAVITY / (length * (4 / 3 - pole / mass)))
    expected = 0.01 * math.cosh(rate * 20 * policy_gradient.DT)
    assert state[0, 2].item() == pytest.approx(expected, rel=0.1)
