"""What a process pays before its first step: torch's compiler is imported when it is needed."""

import pytest

from lazy_tensor.dispatch.tiering.policy import FIRST_CALLS
from tests.processes import run_python

HEAVY = "print([m for m in ('torch._dynamo', 'torch._inductor', 'sympy') if m in sys.modules])"

TRAINS = """
import sys
import torch
import lazy_tensor
from torch import nn

def trained(mode):
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU(), nn.MaxPool2d(2), nn.Flatten(),
        nn.Linear(72, 5), nn.Softmax(-1),
    )
    x, losses = torch.rand(2, 3, 8, 8), []
    for _ in range(6):
        with mode():
            loss = model(x).square().sum()
            loss.backward()
            with torch.no_grad():
                for parameter in model.parameters():
                    parameter -= 0.1 * parameter.grad
                    parameter.grad = None
            losses.append(loss.item())
    return losses
"""


def test_neither_the_import_nor_a_program_waits_for_torchs_compiler():
    program = f"""
{TRAINS}
import contextlib
{HEAVY}
print(trained(lazy_tensor.lazy_mode) == trained(contextlib.nullcontext))
print(lazy_tensor.stats()["ops"] > 100)
{HEAVY}
"""
    assert run_python("-c", program).splitlines() == ["[]", "True", "True", "[]"]


@pytest.mark.parametrize("n_calls", [0, FIRST_CALLS])
def test_replay_does_not_wait_for_torchs_compiler(n_calls):
    program = f"""
import sys
import torch
import lazy_tensor
def step(x):
    for _ in range({n_calls}):
        x = x + 1
    return (x.roll(1, 0) + x.softmax(-1)).flip(0).cumsum(0)
x, replayed = torch.rand(4, 4), lazy_tensor.replay(step)
results = [lazy_tensor.materialize(replayed(x)) for _ in range(6)]
print(all(torch.equal(one, step(x)) for one in results), replayed.n_replayed > 0)
{HEAVY}
"""
    assert run_python("-c", program).splitlines() == ["True True", "[]"]


def test_an_op_that_ran_once_to_tell_what_it_gives_is_recorded():
    program = """
import torch
import lazy_tensor
x = torch.rand(2, 3)
with lazy_tensor.lazy_mode():
    first = (x + 1).softmax(-1)
    second = torch.ops.aten._safe_softmax(x + 1, -1)
    third = torch.ops.aten._safe_softmax(x + 1, -1)
    print(*map(lazy_tensor.is_pending, (first, second, third)))
    print(torch.equal(second, third), torch.equal(first, third))
"""
    assert run_python("-c", program).splitlines() == ["False False True", "True True"]


def test_an_op_that_gave_its_argument_back_does_so_again():
    program = """
import torch
import lazy_tensor
x = lazy_tensor.wrap(torch.rand(3))
print(*(x.dequantize() is x for _ in range(3)))
"""
    assert run_python("-c", program).splitlines() == ["True True True"]


def test_none_runs_where_a_flush_is_forbidden():
    program = """
import torch
import lazy_tensor
x = torch.rand(2, 3)
with lazy_tensor.lazy_mode(forbid={"flush"}):
    print(lazy_tensor.is_pending(torch.ops.aten._safe_softmax(x + 1, -1)))
"""
    assert run_python("-c", program).splitlines() == ["True"]


@pytest.mark.parametrize("record", ["always", "auto"])
def test_what_a_first_run_raises_is_raised_again(record):
    program = f"""
import torch
import lazy_tensor
x, y = torch.rand(2, 3), torch.rand(3)
with lazy_tensor.lazy_mode(record="{record}"):
    for _ in range(3):
        try:
            torch.stack([x + 1, y + 1])
        except RuntimeError as error:
            print(error)
"""
    lines = run_python("-c", program).splitlines()
    assert len(lines) == 3
    assert all("stack expects each tensor to be equal size" in line for line in lines)


@pytest.mark.parametrize("first", ["lazy_mode()", "contextlib.nullcontext()"])
def test_a_compiled_module_runs_in_a_mode_that_was_there_before_torchs_compiler(first):
    program = f"""
import contextlib
import torch
import lazy_tensor
from lazy_tensor import lazy_mode
x, module = torch.rand(4), torch.nn.Linear(4, 4)
with {first}:
    y = x + 1
with lazy_mode():
    function = torch.compile(lambda x: x.sin() * 2, backend="eager", fullgraph=True)
    compiled = torch.compile(module, backend="eager", fullgraph=True)
    z = compiled(function(x + 1))
print(torch.equal(z, module((x + 1).sin() * 2)))
"""
    assert run_python("-c", program).splitlines() == ["True"]


def test_a_value_that_is_read_after_a_block_has_torch_import_no_dtensor():
    program = f"""
import sys
import torch
import lazy_tensor
with lazy_tensor.lazy_mode():
    y = torch.ones(4).sum() * 2
print(y.item())
{HEAVY}
"""
    assert run_python("-c", program).splitlines() == ["8.0", "[]"]
