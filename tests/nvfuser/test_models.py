"""Models that others wrote train by nvFuser's definitions as they do eagerly, but for rounding."""

import pytest

from lazy_tensor import stats
from tests.models.conftest import agree as agree
from tests.models.run import outcome_of, training
from tests.models.test_with_kernels import MODELS, TOLERANCE
from tests.models.zoo import ZOO


@pytest.mark.parametrize("model", MODELS)
def test_training_by_definitions_is_close(model, agree, request):
    entry = ZOO[model]
    program = training(entry, n_steps=3)
    expected = outcome_of(program, entry, "eager")
    interpreted = request.getfixturevalue("interpreted")
    got = outcome_of(program, entry, "mode")
    assert interpreted.n_definitions > 0
    assert stats()["failed"] == 0
    agree(got, expected, model=model, variant="plain", way="mode", backend="nvfuser",
          tolerance=TOLERANCE)  # fmt: skip
