"""Peers that are there are measured, and one that isn't is named."""

import importlib
import warnings

import peers
import pytest
import torch


@pytest.fixture(autouse=True)
def forgotten():
    peers.missing.cache_clear()
    peers.thunder.cache_clear()
    yield
    peers.missing.cache_clear()
    peers.thunder.cache_clear()


def test_a_peer_that_is_missing_is_named(monkeypatch):
    def fails(name):
        raise ModuleNotFoundError(f"No module named {name!r}")

    monkeypatch.setattr(importlib, "import_module", fails)
    assert peers.present(("eager", "compile", "thunder")) == ("eager", "compile")
    [note] = peers.notes(("eager", "compile", "thunder"))
    assert note == (
        "not measured: lightning-thunder is not installed: pip install lightning-thunder"
    )


def test_thunder_runs_a_function_if_it_is_there():
    if peers.missing("thunder"):
        pytest.skip(str(peers.missing("thunder")))
    x = torch.randn(3)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        found = peers.compiled("thunder", lambda t: torch.tanh(t * 2))(x)
    torch.testing.assert_close(found, torch.tanh(x * 2))
