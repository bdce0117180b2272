"""PyTorch's operator database: each op, dtype, sample and variant, lazy against eager."""

from __future__ import annotations

import pytest
import torch
from torch.testing._internal.common_methods_invocations import op_db

from tests.conformance.exceptions import Case
from tests.conformance.op_programs import OUTS, programs_of, samples_of
from tests.conformance.spread import number_of, spread

pytestmark = pytest.mark.filterwarnings("ignore")

DTYPES = (torch.float32, torch.int64, torch.bool, torch.bfloat16, torch.complex64)
N_SAMPLES, MOST_SAMPLES = 1, 24
"""Samples of an op and dtype in a default run, which takes one dtype of each op, and with --full.

Some ops have more than a thousand, of all combinations of a few arguments: a spread is taken.
"""


def dtypes_of(op):
    return [dtype for dtype in DTYPES if op.supports_dtype(dtype, "cpu")]


def pytest_generate_tests(metafunc):
    is_full = metafunc.config.getoption("full")
    cases = []
    for op in op_db:
        dtypes = dtypes_of(op)
        if dtypes and not is_full:
            dtypes = [dtypes[number_of(op.formatted_name) % len(dtypes)]]
        cases += [(op, dtype) for dtype in dtypes]
    ids = [f"{op.formatted_name}-{name_of(dtype)}" for op, dtype in cases]
    metafunc.parametrize(("op", "dtype"), cases, ids=ids)


def name_of(dtype):
    return str(dtype).removeprefix("torch.")


def test_agrees_with_eager(op, dtype, judge, request):
    is_full = request.config.getoption("full")
    most = MOST_SAMPLES if is_full else N_SAMPLES
    first = number_of(op.formatted_name) // 8
    try:
        samples = spread(samples_of(op, dtype), most, op.formatted_name)
        for turn, (number, sample) in enumerate(samples, first):
            # the kinds of `out=` are half of all programs: samples have them in turns
            kind = list(OUTS)[turn % len(OUTS)]
            has_all_kinds = is_full and len(samples) < len(OUTS)
            for variant, program in programs_of(op, sample):
                if variant in OUTS and variant != kind and not has_all_kinds:
                    continue
                case = Case("op_db", op.formatted_name, name_of(dtype), variant, "", number)
                judge.check(case, program)
    finally:
        judge.report()
