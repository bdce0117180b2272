"""Kernels: backends that turn segments of aten ops into callables, and the registry of them."""

from __future__ import annotations

from pkgutil import extend_path

__path__ = extend_path(__path__, __name__)  # by the folder at the root of a checkout

from lazy_tensor.kernels.backend import (
    Backend,
    Kernel,
    PortableBackend,
    available_backends,
    register_backend,
)
from lazy_tensor.kernels.backends.aten import AtenBackend
from lazy_tensor.kernels.backends.inductor import InductorBackend
from lazy_tensor.kernels.nvfuser.backend import NvfuserBackend
from lazy_tensor.kernels.segment import Call, Ref, ScalarRef, Segment, TensorSpec

__all__ = [
    "Backend",
    "Call",
    "Kernel",
    "PortableBackend",
    "Ref",
    "ScalarRef",
    "Segment",
    "TensorSpec",
    "available_backends",
    "register_backend",
]

# the order in which "auto" tries them
register_backend("nvfuser", NvfuserBackend())
register_backend("inductor", InductorBackend())
register_backend("aten", AtenBackend())
