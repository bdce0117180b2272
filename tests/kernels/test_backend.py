"""The registry of backends: what `configure(backend=...)` may name, and what 'auto' means."""

import pytest
import torch

import lazy_tensor
from lazy_tensor.kernels import (
    PortableBackend,
    available_backends,
    backend as registry,
    register_backend,
)
from lazy_tensor.kernels.backends.aten import AtenBackend
from lazy_tensor.kernels.backends.inductor import InductorBackend


@pytest.fixture(autouse=True)
def _own_registry(monkeypatch):
    monkeypatch.setattr(registry, "_backends", dict(registry._backends))


class Broken(AtenBackend):
    def unavailable(self, device_type):
        return "its library is missing"


def test_auto_tries_fusing_backends_before_aten():
    assert list(available_backends()) == ["nvfuser", "inductor", "aten"]
    assert available_backends()["aten"] is None


def test_auto_takes_the_first_that_can_run(monkeypatch):
    monkeypatch.setitem(registry._backends, "inductor", Broken())
    assert registry.choose("auto", "cpu").name == "aten"


def test_auto_on_an_unknown_device_is_aten():
    assert registry.choose("auto", "xla").name == "aten"


def test_unknown_name_lists_those_there_are():
    with pytest.raises(
        ValueError, match="'nvfusor' is not one of 'auto', 'nvfuser', 'inductor', 'aten'"
    ):
        registry.choose("nvfusor", "cpu")


def test_backend_asked_for_by_name_that_cannot_run_says_why():
    register_backend("broken", Broken())
    with pytest.raises(RuntimeError, match="'broken' asked for, but its library is missing"):
        lazy_tensor.configure(backend="broken")


class Elsewhere(AtenBackend):
    """Takes everything, on CUDA."""

    name = "elsewhere"

    def unavailable(self, device_type):
        return None if device_type == "cuda" else "it runs on cuda"

    def refuses(self, call, inputs=()):
        return None


def test_where_the_backend_asked_for_cannot_run_another_does():
    register_backend("elsewhere", Elsewhere())
    assert registry.choose("elsewhere", "cuda").name == "elsewhere"
    assert registry.choose("elsewhere", "cpu").name == registry.choose("auto", "cpu").name
    x = torch.randn(8, 8)
    with lazy_tensor.lazy_mode(backend="elsewhere", compile="blocking"):
        result = lazy_tensor.materialize((x * 2 + 1).relu())
    assert torch.equal(result, (x * 2 + 1).relu())
    assert "segment inductor" in str(lazy_tensor.explain())


def test_registering_something_else_names_what_it_lacks():
    with pytest.raises(TypeError, match="object lacks name, unavailable, refuses, compile"):
        register_backend("toy", object())  # type: ignore[arg-type]


def test_inductor_is_portable_and_aten_is_not():
    assert isinstance(InductorBackend(), PortableBackend)
    assert not isinstance(AtenBackend(), PortableBackend)


def test_inductor_without_a_compiler_says_what_to_do(monkeypatch):
    monkeypatch.setattr("shutil.which", lambda name: None)
    assert "install g++" in str(InductorBackend().unavailable("cpu"))


def test_inductor_is_refused_where_it_cannot_run():
    assert InductorBackend().unavailable("mps") == "it runs on cpu and cuda, not on mps"
