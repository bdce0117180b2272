"""Whether two outcomes are the same: the first difference, in words.

In: what eager and a lazy way showed. Out: None, or one line. Bit for bit unless tolerances are
given.
"""

from __future__ import annotations

from typing import Any

import torch

from tests.conformance.ways import Outcome, Program, Seen, Tolerance

META = ("dtype", "shape", "stride", "layout", "requires_grad")
CANT_BE_COMPILED = "can't be compiled by 'inductor' and runs op by op"
"""What a user is told, once, where Inductor fails on a segment; the results are eager's."""
BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def difference(got: Outcome, expected: Outcome, program: Program) -> str | None:
    """How `got` differs from eager's `expected`; None if it doesn't."""
    if type(got.error) is not type(expected.error) or str(got.error) != str(expected.error):
        return f"raises {_named(got.error)}, eager {_named(expected.error)}"
    missing = expected.warned - got.warned if program.compares_warnings else frozenset()
    unexpected = {text for text in got.warned - expected.warned if CANT_BE_COMPILED not in text}
    if missing or unexpected:
        return f"warns {sorted(got.warned)}, eager {sorted(expected.warned)}"
    if len(got.seen) != len(expected.seen):
        return f"gives {len(got.seen)} values, eager {len(expected.seen)}"
    for position, (a, b) in enumerate(zip(got.seen, expected.seen, strict=True)):
        found = _metadata_difference(a, b)
        if found is None and program.compares_values:
            found = value_difference(a.value, b.value, program.tolerance)
        if found is not None:
            return f"value {position}: {found}"
    return None


def _named(error: Exception | None) -> str:
    return "nothing" if error is None else f"{type(error).__name__}({str(error)[:300]!r})"


def _metadata_difference(a: Seen, b: Seen) -> str | None:
    if a.meta == b.meta:
        return None
    if len(a.meta) != len(b.meta) or len(a.meta) == 1:
        return f"{a.meta}, eager {b.meta}"
    pairs = zip(META, a.meta, b.meta, strict=True)
    return ", ".join(f"{name} {x}, eager {y}" for name, x, y in pairs if x != y)


def value_difference(a: Any, b: Any, tolerance: Tolerance | None) -> str | None:
    if not isinstance(b, torch.Tensor):
        return None if a == b or (a != a and b != b) else f"{a!r}, eager {b!r}"
    is_exact = tolerance is None or not (b.is_floating_point() or b.is_complex())
    if is_exact and a.layout is torch.strided and not b.is_quantized:
        return _bit_difference(a, b)
    rtol, atol = tolerance or (0.0, 0.0)
    try:
        torch.testing.assert_close(a, b, rtol=rtol, atol=atol, equal_nan=True)
    except AssertionError as error:
        return " ".join(str(error).split())
    return None


def _bit_difference(a: torch.Tensor, b: torch.Tensor) -> str | None:
    a, b = a.resolve_conj().resolve_neg(), b.resolve_conj().resolve_neg()
    if a.dtype.is_complex:
        a, b = torch.view_as_real(a), torch.view_as_real(b)
    if not a.dtype.is_floating_point:
        return None if torch.equal(a, b) else _worst(a, b)
    bits = BITS[a.dtype.itemsize]
    a, b = a.contiguous(), b.contiguous()
    same = a.view(bits) == b.view(bits)
    if bool(same.all()) or bool((same | (a.isnan() & b.isnan())).all()):
        return None
    return _worst(a, b)


def _worst(a: torch.Tensor, b: torch.Tensor) -> str:
    differs = (a != b) & ~(a.isnan() & b.isnan())
    if not bool(differs.any()):
        return "zeros differ in sign"
    at = tuple(differs.nonzero()[0].tolist())
    return f"{int(differs.sum())} of {a.numel()} elements, at {at} {a[at]}, eager {b[at]}"
