"""PyTorch's module database: training and evaluation of each module, lazy against eager."""

from __future__ import annotations

import pytest
import torch
from torch.testing._internal.common_modules import module_db

from tests.conformance.exceptions import Case
from tests.conformance.module_programs import inputs_of, program_of
from tests.conformance.spread import spread

N_INPUTS, MOST_INPUTS = 1, 12
DTYPES = (torch.float32, torch.bfloat16, torch.complex64)

pytestmark = pytest.mark.filterwarnings("ignore")


def pytest_generate_tests(metafunc):
    dtypes = DTYPES if metafunc.config.getoption("full") else DTYPES[:1]
    cases = [(m, d) for m in module_db for d in dtypes if d in m.supported_dtypes("cpu")]
    ids = [f"{m.formatted_name}-{str(d).removeprefix('torch.')}" for m, d in cases]
    metafunc.parametrize(("info", "dtype"), cases, ids=ids)


def test_agrees_with_eager(info, dtype, judge, request):
    is_full = request.config.getoption("full")
    most = MOST_INPUTS if is_full else N_INPUTS
    try:
        for training in (True, False) if is_full or info.train_and_eval_differ else (True,):
            inputs = inputs_of(info, dtype, training)
            for number, given in spread(inputs, most, info.name):
                name = str(dtype).removeprefix("torch.")
                variant = "train" if training else "eval"
                case = Case("module_db", info.formatted_name, name, variant, "", number)
                judge.check(case, program_of(info, given, dtype, training))
    finally:
        judge.report()
