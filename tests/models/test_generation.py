"""`generate` and inference give what they give eagerly, caches and scores included."""

import pytest
import torch

from tests.models.run import GENERATION, WAYS, generation, inference, outcome_of
from tests.models.sample import cases
from tests.models.zoo import ZOO

GENERATIVE = {name: list(GENERATION) for name, entry in ZOO.items() if entry.prompt is not None}
GRAD_MODES = {
    "no_grad": torch.no_grad,
    "inference_mode": torch.inference_mode,
    "enable_grad": torch.enable_grad,
}


@pytest.mark.parametrize(("model", "how", "way"), cases(GENERATIVE, ("mode", "wrap")))
def test_generate_is_bit_equal(model, how, way, agree):
    entry = ZOO[model]
    program = generation(entry, how)
    expected = outcome_of(program, entry, "eager")
    agree(outcome_of(program, entry, way), expected, model=model, variant=how, way=way)


@pytest.mark.parametrize(
    ("model", "grad_mode", "way"), cases(dict.fromkeys(ZOO, list(GRAD_MODES)), WAYS)
)
def test_inference_is_bit_equal(model, grad_mode, way, agree):
    entry = ZOO[model]
    program = inference(entry, GRAD_MODES[grad_mode])
    expected = outcome_of(program, entry, "eager")
    agree(outcome_of(program, entry, way), expected, model=model, variant=grad_mode, way=way)
