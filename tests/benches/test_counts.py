"""What CI compares: counts that grew fail, others don't."""

import bench_counts
import pytest


@pytest.fixture
def kept(tmp_path, monkeypatch):
    monkeypatch.setattr(bench_counts, "COUNTS", tmp_path / "counts.json")
    bench_counts.compare("step", {"kernels": 4, "copies": 0}, update=True)
    bench_counts.compare("other", {"kernels": 1}, update=True)


@pytest.mark.parametrize("found", [{"kernels": 4, "copies": 0}, {"kernels": 3, "copies": 0}])
def test_counts_may_stay_and_fall(found, kept):
    bench_counts.compare("step", found, update=False)


@pytest.mark.parametrize(
    ("found", "told"),
    [
        ({"kernels": 5, "copies": 0}, "kernels.*4 -> 5"),
        ({"kernels": 4, "copies": 1}, "copies.*0 -> 1"),
        ({"kernels": 4, "collectives": 1}, "collectives.*None -> 1"),
    ],
)
def test_counts_that_grow_are_named(found, told, kept):
    with pytest.raises(AssertionError, match=told):
        bench_counts.compare("step", found, update=False)
