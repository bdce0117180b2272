"""Random programs from fixed seeds, lazily as eagerly."""

import pytest
from fuzzing.grammar import PRODUCTIONS, new_tensor
from fuzzing.program import programs
from fuzzing.sides import EXACT, difference
from hypothesis import HealthCheck, given, seed, settings

N_SEEDS, N_PROGRAMS = 8, 25


@pytest.mark.parametrize("number", range(N_SEEDS))
def test_random_programs_give_the_same_lazily(number):
    @seed(number)
    @settings(
        max_examples=N_PROGRAMS,
        deadline=None,
        database=None,
        suppress_health_check=list(HealthCheck),
        print_blob=False,
    )
    @given(program=programs(PRODUCTIONS, new_tensor))
    def agrees(program):
        for side in EXACT:
            found = difference(program, side)
            assert found is None, f"{side.name}: {found}\n\n{program}"

    agrees()
