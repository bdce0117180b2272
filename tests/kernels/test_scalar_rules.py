"""Run-time scalars in compiled segments promote as Python numbers do, whatever their value."""

import pytest
import torch
from torch import Tensor

from lazy_tensor.kernels.backends.inductor import InductorBackend

FLOAT = 0.123456789012345


def arithmetic(x: Tensor, s: float) -> tuple[Tensor, ...]:
    return (
        x * s, x + s, s - x, x / s, x.sub(x, alpha=s), x > s, x.clamp_max(s), x.clamp(-0.5, s),
        torch.where(x > 0, x, s), torch.full_like(x, s), torch.full((2,), s),
        x.masked_fill(x > 0, s),
    )  # fmt: skip


def floats_only(x: Tensor, s: float) -> tuple[Tensor, ...]:
    return (
        *arithmetic(x, s), x.lerp(x * 2, s), x.addcmul(x, x, value=s), x.addcdiv(x, x + 8, value=s),
        torch.nn.functional.leaky_relu(x, s), x.remainder(s), (x * x).pow(s), s ** x,
    )  # fmt: skip


def integers(x: Tensor, s: float) -> tuple[Tensor, ...]:
    return x * s, x + s, s - x, x / s, x > s, x == s


def halves(x: Tensor, s: float) -> tuple[Tensor, ...]:
    """Ops for which eager rounds the number to half precision: a few ulps are too much."""
    return (
        x == s, x != s, x < s, x <= s, x > s, x >= s, x % s, torch.fmod(x, s), x.abs() ** s, x + s,
        torch.where(x >= s, x, 0),
    )  # fmt: skip


def powers(x: Tensor, s: float) -> tuple[Tensor, ...]:
    power = x**s
    return power, 1 / power


def factors(x: Tensor, s: float) -> tuple[Tensor, ...]:
    return x.addcmul(x, x, value=s), (x + 2**53).addcmul(x, x, value=s)


def in_place(x: Tensor, s: float) -> tuple[Tensor, ...]:
    y = x * 1
    y.mul_(s).add_(x, alpha=s).clamp_min_(s)
    return y, torch.zeros_like(x).fill_(s)


def filled(x: Tensor, s: float) -> tuple[Tensor, ...]:
    """Integers that float32 can't hold; those that are not filled must stay."""
    y = x + 2**53
    return y.masked_fill(x > 0, s), y.clone().masked_fill_(x > 0, s), y.clone().fill_(s)


CASES = {
    "int64, filled": (filled, torch.arange(-5, 5), 20000001.0),
    "int64, filled with an int": (filled, torch.arange(-5, 5), 2**53 + 1),
    "bool, filled": (lambda x, s: (x.masked_fill(~x, s),), torch.tensor([True, False]), 2.0),
    "float32": (floats_only, torch.linspace(-3, 3, 37), FLOAT),
    "float64": (floats_only, torch.linspace(-3, 3, 37, dtype=torch.float64), FLOAT),
    "bfloat16": (arithmetic, torch.linspace(-3, 3, 37).bfloat16(), FLOAT),
    "float16, int scalar": (arithmetic, torch.linspace(-3, 3, 37).half(), 3),
    "int64, float scalar": (integers, torch.arange(-5, 5), 2.5),
    "int32, int scalar": (integers, torch.arange(-5, 5, dtype=torch.int32), 3),
    "bool, float scalar": (lambda x, s: (x * s, x + s), torch.tensor([True, False]), FLOAT),
    "0-dim float32": (integers, torch.tensor(2.0), FLOAT),
    "0-dim int64": (integers, torch.tensor(2), FLOAT),
    "bfloat16, compared": (halves, torch.tensor([0.3, 0.7, -0.3, 1, 84]).bfloat16(), 0.3),
    "float16, compared": (halves, torch.tensor([0.3, 0.7, -0.3, 1, 84]).half(), 0.7),
    **{
        f"power {s}": (powers, torch.tensor([-0.0, 0.0, -float("inf"), 2.0, float("inf")]), s)
        for s in (0.5, -0.5, 1.0, 3.0, -1.0, 2.0)
    },
    "int64, factor": (factors, torch.arange(-5, 5), 2.5),
    "in place": (in_place, torch.linspace(-3, 3, 37), FLOAT),
    "in place in int64": (in_place, torch.arange(-5, 5), 3),
    "a number alone": (
        lambda x, s: (x * s, torch.full((), s, dtype=torch.float64)),
        torch.ones(3),
        FLOAT,
    ),
}
ULPS = {torch.float64: 4e-15, torch.float32: 4e-7, torch.bfloat16: 8e-3, torch.float16: 1e-3}


@pytest.mark.parametrize("case", CASES)
def test_kernel_with_scalars_is_eager_within_two_ulps(record, compiler, case):
    fn, x, scalar = CASES[case]
    recorded = record(fn, [x], [scalar])
    fusion = compiler.fusion_of(recorded.segment, InductorBackend(), mode="blocking")
    assert fusion.status == "ready", fusion.reason
    for ours, eager in zip(fusion.run([x], [scalar]), recorded.results, strict=True):
        assert ours.dtype == eager.dtype
        tolerance = ULPS.get(eager.dtype, 0)
        torch.testing.assert_close(ours, eager, rtol=tolerance, atol=tolerance, equal_nan=True)


def test_other_values_need_no_other_kernel(record, compiler):
    fn, x, scalar = CASES["float32"]
    fusion = compiler.fusion_of(
        record(fn, [x], [scalar]).segment, InductorBackend(), mode="blocking"
    )
    for value in (-1.5, 0.0, 1e-30):
        eager = [t for t in arithmetic(x, value)]
        for ours, expected in zip(fusion.run([x], [value]), eager, strict=False):
            torch.testing.assert_close(ours, expected)


def test_a_number_that_a_library_call_needs_as_a_tensor_is_declined(record, compiler):
    recorded = record(lambda x, n: x.pow(n) * 2, [torch.arange(4)], [3])
    fusion = compiler.fusion_of(recorded.segment, InductorBackend(), mode="blocking")
    assert fusion.status == "declined", fusion.reason
    assert torch.equal(fusion.run(recorded.inputs, [3])[0], recorded.results[0])


def test_same_segment_in_two_threads_keeps_their_scalars_apart(record, compiler):
    from concurrent.futures import ThreadPoolExecutor

    recorded = record(lambda x, s: (x * s,), [torch.ones(64)], [2.5])
    fusion = compiler.fusion_of(recorded.segment, InductorBackend(), mode="blocking")

    def product(value: float) -> bool:
        return bool((fusion.run(recorded.inputs, [value])[0] == value).all())

    with ThreadPoolExecutor(4) as pool:
        assert all(pool.map(product, [float(i) for i in range(2000)]))
