"""Random programs from fixed seeds, lazily as eagerly."""

import pytest
from fuzzing.grammar import LOOPS, PRODUCTIONS, new_tensor
from fuzzing.program import programs
from fuzzing.sides import EXACT, difference, difference_of_loop
from hypothesis import HealthCheck, given, seed, settings

N_SEEDS, N_PROGRAMS = 8, 25


SIZES = settings(
    max_examples=N_PROGRAMS,
    deadline=None,
    database=None,
    suppress_health_check=list(HealthCheck),
    print_blob=False,
)


@pytest.mark.parametrize("number", range(N_SEEDS))
def test_random_programs_give_the_same_lazily(number):
    @seed(number)
    @SIZES
    @given(program=programs(PRODUCTIONS, new_tensor))
    def agrees(program):
        for side in EXACT:
            found = difference(program, side)
            assert found is None, f"{side.name}: {found}\n\n{program}"

    agrees()


@pytest.mark.parametrize("number", range(N_SEEDS))
def test_random_loops_give_the_same_replayed(number):
    replayed = []

    @seed(number)
    @SIZES
    @given(program=programs(LOOPS, new_tensor, max_lines=12))
    def agrees(program):
        found, n_replayed = difference_of_loop(program)
        assert found is None, f"{found}\n\n{program}"
        replayed.append(n_replayed)

    agrees()
    assert sum(replayed) > 0
