"""Models that others wrote train with compiled kernels as they do eagerly, but for rounding."""

import pytest

import lazy_tensor
from lazy_tensor import stats
from tests.models.run import outcome_of, training
from tests.models.zoo import ZOO

TOLERANCE = 5e-4
"""AdamW divides each gradient by its own size: one that is zero but for rounding (a key's bias in
attention) moves its parameter by up to the learning rate, in a direction that rounding decides."""
MODELS = ("resnet", "unet", "vit", "llama", "gpt2", "mamba", "mixtral", "bert", "t5", "whisper")
CASES = list(zip(MODELS, ["wrap", "mode"] * (len(MODELS) // 2), strict=True))


@pytest.fixture(scope="module")
def cache_dir(tmp_path_factory):
    return str(tmp_path_factory.mktemp("kernels"))


# A model takes a minute or two: sixty kernels, each compiled while the test waits.
@pytest.mark.full
@pytest.mark.parametrize(("model", "way"), CASES)
def test_training_with_kernels_is_close(model, way, agree, cache_dir):
    entry = ZOO[model]
    program = training(entry, n_steps=3)
    expected = outcome_of(program, entry, "eager")
    lazy_tensor.configure(backend="inductor", compile="blocking", cache_dir=cache_dir)
    got = outcome_of(program, entry, way)
    assert stats()["segments"] > 0
    assert stats()["failed"] == 0
    agree(got, expected, model=model, variant="plain", way=way, backend="inductor",
          tolerance=TOLERANCE)  # fmt: skip
