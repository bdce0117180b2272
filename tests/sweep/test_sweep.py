"""Each public callable of torch gives on pending tensors what it gives eagerly: a core of them, all
with `--full`."""

import pytest

from tests.sweep import callables
from tests.sweep.run import sweep_all

N_PARTS = 4


def agrees(names, *options):
    result = sweep_all(names, 1, *options)
    assert sorted(map(str, result.unlisted())) == []
    assert set(result.counts) == set(names)
    return result


@pytest.mark.parametrize("part", range(N_PARTS))
def test_a_core_of_all_callables_agrees(part):
    """In processes with torch's compiler, and without it: what an op gives is told otherwise."""
    agrees(callables.core()[part::N_PARTS], "--patterns", "2", *["--compiler"] * (part % 2))


@pytest.mark.full
def test_all_callables_agree():
    assert agrees(callables.names()).stale() == []


def test_what_is_left_out_has_a_reason_and_a_name():
    every = list(callables.all_names())
    for pattern, reason in callables.SKIPPED.items():
        assert reason
        assert any(callables.is_skipped_by(name, pattern) for name in every), pattern
