"""PyTorch's optimizer database: training with each configuration, lazy against eager."""

from __future__ import annotations

import pytest
from torch.testing._internal.common_optimizers import optim_db

from tests.conformance.exceptions import Case
from tests.conformance.optimizer_programs import configurations, programs_of
from tests.conformance.spread import number_of, spread

N_CONFIGURATIONS = 2

pytestmark = pytest.mark.filterwarnings("ignore")


@pytest.mark.parametrize("info", optim_db, ids=lambda info: info.name)
def test_agrees_with_eager(info, judge, request):
    is_full = request.config.getoption("full")
    most = None if is_full else N_CONFIGURATIONS
    try:
        for number, (implementation, options) in spread(configurations(info), most, info.name):
            programs = list(programs_of(info, options))
            if not is_full:
                programs = [programs[number_of(f"{info.name} {number}") % len(programs)]]
            for when, program in programs:
                variant = f"{implementation}, {when}"
                judge.check(Case("optim_db", info.name, "float32", variant, "", number), program)
    finally:
        judge.report()
