"""PyTorch's operator database under Inductor's kernels: each op fused with pointwise ops."""

from __future__ import annotations

import pytest
import torch
from torch.testing._internal.common_methods_invocations import op_db
from torch.testing._internal.opinfo.core import (
    BinaryUfuncInfo,
    OpInfo,
    ReductionOpInfo,
    UnaryUfuncInfo,
)

import lazy_tensor
from tests.conformance.exceptions import Case
from tests.conformance.kernel_programs import program_of, together, tolerance_of
from tests.conformance.op_programs import UNINITIALISED, samples_of
from tests.conformance.spread import spread
from tests.conformance.ways import Tolerance

DTYPES = [torch.float32, torch.bfloat16, torch.int64, torch.bool]
FUSIBLE = (UnaryUfuncInfo, BinaryUfuncInfo, ReductionOpInfo)
N_OPS, N_TOGETHER = 24, 12
"""Ops in a default run, of kinds that kernels are made of; and how many make one program.

Compiling takes 3-10 s, be it one op or ten.
"""

pytestmark = pytest.mark.filterwarnings("ignore")


@pytest.fixture(autouse=True)
def kernels(op_by_op, pytestconfig):
    directory = pytestconfig.rootpath / "build" / "conformance"
    lazy_tensor.configure(backend="inductor", compile="blocking", cache_dir=str(directory))


def pytest_generate_tests(metafunc):
    ops = [op for op in op_db if op.name not in UNINITIALISED]
    dtypes = DTYPES
    if not metafunc.config.getoption("full"):
        fusible = [op for op in ops if isinstance(op, FUSIBLE) and supports(op, torch.float32)]
        ops, dtypes = [op for _, op in spread(fusible, N_OPS, "kernels")], DTYPES[:1]
    groups = [(group, dtype) for dtype in dtypes for group in groups_of(ops, dtype)]
    ids = [f"{group[0].formatted_name}-and-{len(group) - 1}-{name_of(d)}" for group, d in groups]
    metafunc.parametrize(("ops", "dtype"), groups, ids=ids)


def supports(op, dtype):
    return op.supports_dtype(dtype, "cpu")


def name_of(dtype):
    return str(dtype).removeprefix("torch.")


def groups_of(ops, dtype):
    """The ops that support `dtype`, in groups of one tolerance."""
    by_tolerance: dict[Tolerance, list[OpInfo]] = {}
    for op in ops:
        if supports(op, dtype):
            by_tolerance.setdefault(tolerance_of(op, dtype), []).append(op)
    for alike in by_tolerance.values():
        yield from (alike[i : i + N_TOGETHER] for i in range(0, len(alike), N_TOGETHER))


def first_sample(op, dtype):
    """The number and the sample of the first whose input is no single element, if there is one.

    Ops on computed single elements run at once, and nothing is fused.
    """
    samples = list(enumerate(samples_of(op, dtype)))
    large = (s for s in samples if isinstance(s[1].input, torch.Tensor) and s[1].input.numel() > 1)
    return next(large, samples[0] if samples else None)


def test_agrees_with_eager(ops, dtype, judge):
    programs = []
    for op in ops:
        found = first_sample(op, dtype)
        if found is not None:
            number, sample = found
            case = Case("op_db", op.formatted_name, name_of(dtype), "fused", "", number, "inductor")
            programs.append((case, program_of(op, sample, dtype)))
    try:
        judge.check_together(programs, together)
    finally:
        judge.report()
