"""Models that others wrote train lazily as they do eagerly, bit by bit."""

from typing import Any

import pytest
import torch

from lazy_tensor import lazy_mode, stats, wrap
from tests.models.compare import distance
from tests.models.run import WAYS, left_behind, outcome_of, training
from tests.models.sample import cases
from tests.models.zoo import ZOO

pytestmark = pytest.mark.filterwarnings(
    "ignore:`gradient_checkpointing_enable` is deprecated:FutureWarning",
    "ignore:replay.*goes on recording",
)
VARIANTS: dict[str, dict[str, Any]] = {
    "plain": {},
    "autocast": {"autocast": True},
    "checkpointing": {"prepare": "checkpointing"},
    "bfloat16": {"prepare": "bfloat16"},
}
DROPS_LAYERS = ("bart", "wrap")  # by chance, and a step is one trace: no two may be alike
CASES = {
    name: [variant for variant in VARIANTS if variant not in entry.lacks]
    for name, entry in ZOO.items()
}


@pytest.mark.parametrize(("model", "variant", "way"), cases(CASES, (*WAYS, "replay")))
def test_training_is_bit_equal(model, variant, way, agree):
    entry = ZOO[model]
    # the backward of a replayed forward repeats later
    program = training(entry, n_steps=8 if way == "replay" else 4, **VARIANTS[variant])
    expected, n_bytes_then = left_behind(lambda: outcome_of(program, entry, "eager"))
    found, n_bytes = left_behind(lambda: outcome_of(program, entry, way))
    agree(found, expected, model=model, variant=variant, way=way)
    if way != "replay":  # which keeps what it needs to repeat calls with the model, a cycle
        assert stats()["plans_reused"] > 0 or (model, way) == DROPS_LAYERS
        assert n_bytes <= n_bytes_then  # some models are cycles


def test_what_only_the_collector_frees_is_counted():
    def work():
        cycle: list[Any] = [torch.ones(1000)]
        cycle.append(cycle)
        return {"kept": torch.ones(10)}

    assert left_behind(work)[1] == 4000


def test_comparison_sees_the_last_bit():
    entry = ZOO["resnet"]
    expected = outcome_of(training(entry), entry, "eager")
    name = "gradient head.weight"
    changed = expected | {name: expected[name].nextafter(torch.tensor(9.0))}
    assert distance(changed, expected).where == name
    assert 0 < distance(changed, expected).relative < 1e-6


def test_another_seed_is_another_outcome():
    entry = ZOO["llama"]
    expected = outcome_of(training(entry), entry, "eager")
    shifted = training(entry, first_seed=6)
    assert distance(outcome_of(shifted, entry, "mode"), expected).relative > 1e-3


def test_wrapped_model_trains_in_the_mode_too(agree):
    entry = ZOO["gpt2"]
    program = training(entry)
    expected = outcome_of(program, entry, "eager")
    with lazy_mode():
        got = program(wrap(entry.build()))
    agree(got, expected, model="gpt2", variant="plain", way="both")
