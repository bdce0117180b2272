"""The wrong inputs of PyTorch's operator database: eager's error, at the op itself."""

from __future__ import annotations

import pytest
from torch.testing._internal.common_methods_invocations import op_db

from tests.conformance.exceptions import Case
from tests.conformance.op_programs import fresh
from tests.conformance.spread import seed, spread
from tests.conformance.ways import Program

pytestmark = pytest.mark.filterwarnings("ignore")

N_INPUTS, MOST_INPUTS = 2, 64
OPS = [op for op in op_db if op.error_inputs_func is not None]


def program_of(op, sample):
    def run(given):
        tensor, args, kwargs = given
        try:
            op(tensor, *args, **kwargs)
        except TypeError as error:  # it may tell the types of the arguments
            raise TypeError(str(error).replace("LazyTensor", "Tensor")) from None
        raise AssertionError("the op let it pass")

    return Program(lambda: fresh(sample), run)


@pytest.mark.parametrize("op", OPS, ids=lambda op: op.formatted_name)
def test_raises_as_eager(op, judge, request):
    most = MOST_INPUTS if request.config.getoption("full") else N_INPUTS
    seed()
    try:
        for number, wrong in spread(op.error_inputs("cpu"), most, op.formatted_name):
            case = Case("op_db", op.formatted_name, "any", "wrong input", "", number)
            judge.check(case, program_of(op, wrong.sample_input))
    finally:
        judge.report()
