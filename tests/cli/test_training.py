"""The model and the plain training step, before anything lazy touches them."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from lazy_tensor.cli.gpt import GPT, SIZES
from lazy_tensor.cli.training import RandomStream, Recipe, Trainer, warmup_cosine

RECIPE = Recipe(size="tiny", batch=2, steps=4, dropout=0.1)


def batch_of(recipe):
    context = recipe.model_config.context
    tokens = torch.arange(recipe.batch * context).reshape(recipe.batch, context) % 7
    return tokens, (tokens + 1) % 7


def test_model_maps_bytes_to_logits_of_the_next_byte():
    config = SIZES["tiny"]
    logits = GPT(config)(torch.zeros(3, config.context, dtype=torch.int64))
    assert logits.shape == (3, config.context, 256)


def test_model_is_causal():
    config = SIZES["tiny"]
    model = GPT(config)
    tokens = torch.zeros(1, config.context, dtype=torch.int64)
    changed = tokens.clone()
    changed[0, 10:] = 65
    torch.testing.assert_close(model(tokens)[:, :10], model(changed)[:, :10])


@pytest.mark.parametrize("tied", [True, False])
def test_head_is_tied_if_asked(tied):
    model = GPT(replace(SIZES["tiny"], tied=tied))
    assert (model.head.weight is model.token_embedding.weight) == tied


def test_training_lowers_the_loss():
    trainer = Trainer(replace(RECIPE, steps=20, dropout=0.0))
    losses = [trainer.step(*batch_of(RECIPE)) for _ in range(20)]
    assert losses[-1] < losses[0] - 0.3


def test_interleaved_trainers_with_dropout_agree_bit_for_bit():
    first, second = Trainer(RECIPE), Trainer(RECIPE)
    for _ in range(3):
        losses = []
        for trainer in (first, second):
            with trainer.random.active():
                losses.append(trainer.step(*batch_of(RECIPE)))
        assert losses[0] == losses[1]


def test_random_stream_goes_on_where_it_stopped_and_leaves_the_default_generator_alone():
    torch.manual_seed(5)
    whole = torch.rand(4)
    state = torch.get_rng_state()
    stream = RandomStream(5, torch.device("cpu"))
    parts = []
    for _ in range(2):
        with stream.active():
            parts.append(torch.rand(2))
        torch.rand(3)
        torch.set_rng_state(state)
    assert torch.equal(torch.cat(parts), whole)
    assert torch.equal(torch.get_rng_state(), state)


def test_learning_rate_warms_up_and_decays_to_a_tenth():
    shares = [warmup_cosine(step, 100) for step in range(101)]
    assert shares[0] == pytest.approx(0.1)
    assert shares[9] == max(shares) == 1.0
    assert shares[100] == pytest.approx(0.1)
