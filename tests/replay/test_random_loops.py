"""Random training loops by `replay(model)` do what they do in eager (see `random_loops`)."""

import pytest

from tests.replay.random_loops import difference


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("first", range(0, 40, 8))
def test_random_training_loops(first):
    results = [difference(seed) for seed in range(first, first + 8)]
    assert not [found for found, _ in results if found]
    assert sum(n_replayed for _, n_replayed in results)
