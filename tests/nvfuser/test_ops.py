"""PyTorch's operator database, forward and backward, by nvFuser's definitions."""

import pytest
import torch
from torch.testing._internal.common_methods_invocations import op_db

import lazy_tensor
from tests.conformance.exceptions import Case
from tests.conformance.judge import Judge
from tests.conformance.kernel_programs import program_of, together
from tests.conformance.op_programs import UNINITIALISED
from tests.conformance.test_kernels import first_sample, groups_of, name_of

DTYPES = [torch.float32, torch.bfloat16, torch.int64, torch.bool]
GROUPS = [
    (group, dtype)
    for dtype in DTYPES
    for group in groups_of([op for op in op_db if op.name not in UNINITIALISED], dtype)
]

IS_JUDGED = torch.__version__ >= "2.13"
"""The list of exceptions is for this torch: an older one's own faults are others. There, what
counts is that nvFuser takes the definitions."""

ONE_IN, FIRST = 4, int(IS_JUDGED)
"""Of the groups a run without `--full` takes one in so many, from this one on: others with another
torch, so that CI's two environments take different ones."""
CASES = [
    pytest.param(
        ops,
        dtype,
        id=f"{ops[0].formatted_name}-and-{len(ops) - 1}-{name_of(dtype)}",
        marks=[] if i % ONE_IN == FIRST else [pytest.mark.full],
    )
    for i, (ops, dtype) in enumerate(GROUPS)
]

DECLINED = {
    "a correction of",
    "gather of a 0-dim tensor",
    "index_select of a 0-dim tensor",
    "nvFuser refuses it: INTERNAL ASSERT FAILED",
}
"""What definitions can't say: rare, so that nothing is lost by leaving it to another backend."""


def reason_of(text):
    return next((known for known in DECLINED if text.startswith(known)), text)


pytestmark = pytest.mark.filterwarnings("ignore")


@pytest.mark.parametrize(("ops", "dtype"), CASES)
def test_agrees_with_eager(ops, dtype, interpreted, record_property):
    judge, programs = Judge(record_property), []
    for op in ops:
        found = first_sample(op, dtype)
        if found is not None:
            number, sample = found
            case = Case(
                "op_db", op.formatted_name, name_of(dtype), "fused-nvfuser", "", number, "nvfuser"
            )
            programs.append((case, program_of(op, sample, dtype)))
    judge.check_together(programs, together)
    assert lazy_tensor.stats()["failed"] == 0
    assert set(map(reason_of, interpreted.declined)) <= DECLINED
    if IS_JUDGED:
        judge.report()
