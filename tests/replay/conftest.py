"""What tests of `replay` have in common."""

import warnings

import pytest


@pytest.fixture
def quiet():
    """No warnings of calls that are recorded each time."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="replay.* goes on recording")
        yield
