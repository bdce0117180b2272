"""The command that runs other projects' suites does what it says, on a suite made up here."""

import pytest

from tests.thirdparty import outcomes
from tests.thirdparty.outcomes import compare, reason
from tests.thirdparty.page import page
from tests.thirdparty.run import HERE, read_suites, run

TESTS = """
import os
import random

import lazy_tensor
import torch


def test_adds():
    assert (torch.ones(2) + 1).tolist() == [2.0, 2.0]


def test_asks_for_the_class():
    assert type(torch.ones(2)) is torch.Tensor


def test_dies():
    if lazy_tensor.is_lazy(torch.ones(2)):
        os._exit(7)


def test_fails_eagerly():
    raise AssertionError


def test_prints_what_it_draws():
    print()
    print("drawn", torch.rand(1).item(), random.random())
"""
FAIL_LAZILY = {"test_other.py::test_asks_for_the_class", "test_other.py::test_dies"}
SUITE = read_suites(HERE / "suites.toml")["einops"] | {"args": ["-s", "test_other.py"]}


@pytest.fixture(scope="module")
def results(tmp_path_factory):
    source, results = tmp_path_factory.mktemp("source"), tmp_path_factory.mktemp("results")
    (source / "test_other.py").write_text(TESTS)
    for way in ("eager", "record"):
        run(SUITE, source, way, results, "other", 60.0)
    return results


@pytest.fixture
def comparison(results):
    return compare(results, "other", "record")


@pytest.fixture
def known(monkeypatch):
    known = {"other": {"test_other.py::test_asks*": "it asks `type(x) is torch.Tensor`"}}
    monkeypatch.setattr(outcomes, "expected", lambda: known)


def test_what_passes_eagerly_runs_lazily(comparison):
    assert len(comparison.eager.tests) == 5
    assert comparison.ran == comparison.eager.passed
    assert len(comparison.ran) == 4
    assert set(comparison.failed) == FAIL_LAZILY
    assert comparison.lazy.n_recorded > 0


def test_a_test_that_takes_the_process_down_is_one_that_failed(comparison):
    assert comparison.failed["test_other.py::test_dies"].outcome == "the process ended"


def test_numbers_drawn_are_the_same(results):
    drawn = [
        {line for log in results.glob(f"other.{way}.*.log") for line in log.read_text().splitlines()
         if line.startswith("drawn")}
        for way in ("eager", "record")
    ]  # fmt: skip
    assert len(drawn[0]) == 1
    assert drawn[0] == drawn[1]


def test_what_is_expected_has_a_name_and_a_reason(comparison, known):
    assert set(comparison.expected) | set(comparison.differs) == FAIL_LAZILY
    assert set(comparison.differs) == {"test_other.py::test_dies"}
    assert reason("other", "test_other.py::test_adds") is None


def test_the_page_says_what_differs_and_why_the_others_may(comparison, known):
    text = page({"other": SUITE}, [comparison])
    assert f"| {SUITE['commit'][:12]} | record | 4 | 4 | 2 | 1 | 1 |" in text
    assert "- `other`, record: `test_other.py::test_dies`: the process ended" in text
    assert "it asks `type(x) is torch.Tensor`" in text


def test_every_suite_of_which_something_is_expected_is_listed():
    expected = outcomes.expected()
    assert set(expected) <= set(read_suites(HERE / "suites.toml"))
    assert all(why for tests in expected.values() for why in tests.values())


def test_options_that_pytest_refuses_are_an_error(tmp_path):
    suite = SUITE | {"args": ["--no-such-option"]}
    with pytest.raises(RuntimeError, match=r"ran nothing of other:[^$]*--no-such-option"):
        run(suite, tmp_path, "eager", tmp_path, "other", 60.0)
