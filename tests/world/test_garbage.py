"""Training leaves no cycles, in any state of the trace: memory is given back when it is let go."""

import gc
from contextlib import nullcontext
from types import FunctionType

import pytest
import torch

import lazy_tensor
from lazy_tensor import lazy_mode, replay, unwrap, wrap
from lazy_tensor.dispatch.run.compile_service import compiler
from lazy_tensor.dispatch.trie.trace import local

COLD = 1
"""What the policy has where ops run at once, unrecorded."""


def parts():
    torch.manual_seed(0)
    model = torch.nn.Sequential(
        torch.nn.Linear(3, 8), torch.nn.LayerNorm(8), torch.nn.GELU(), torch.nn.Linear(8, 1)
    )
    return model, torch.optim.AdamW(model.parameters())


def step(model, optimizer):
    optimizer.zero_grad()
    loss = model(torch.ones(2, 3)).square().mean()
    loss.backward()
    optimizer.step()
    return loss.detach()


def is_ours(thing):
    """Whether it holds memory, or is of this package; torch's meta functions leave cycles.
    So does its `tree_flatten`, with the function `is_leaf`."""
    if (
        isinstance(thing, FunctionType)
        and thing.__qualname__ == "Take._flattened.<locals>.<lambda>"
    ):
        return False
    module = getattr(thing, "__module__", None) or type(thing).__module__
    return isinstance(thing, torch.Tensor) or str(module).startswith("lazy_tensor")


def garbage_of(steps, n=4):
    """The objects that only the collector can free after so many calls.

    Seen twice: what an earlier test has left (kernels that are built meanwhile, the trace of a
    thread that ends) is gone by the second time.
    """
    compiler().wait()
    return new_garbage(steps, n) and new_garbage(steps, n)


def new_garbage(steps, n):
    gc.collect()
    gc.disable()
    gc.set_debug(gc.DEBUG_SAVEALL)
    try:
        for _ in range(n):
            steps()
        gc.collect()
        return [thing for thing in gc.garbage if is_ours(thing)]
    finally:
        gc.set_debug(0)
        gc.garbage.clear()
        gc.enable()


@pytest.mark.parametrize("state", ["cold", "interpreted", "planned", "wrapped", "wrapped_cold"])
def test_steps_leave_no_garbage(state):
    model, optimizer = parts()
    if state.startswith("wrapped"):
        wrap(model)

    def one():
        with nullcontext() if state.startswith("wrapped") else lazy_mode():
            # here, as a block that begins looks whether to record again
            local.trace.policy.cold = COLD if state.endswith("cold") else 0
            step(model, optimizer)
        lazy_tensor.flush()

    one()  # what is made once in a process
    if state == "interpreted":
        lazy_tensor.cache_clear()
    elif state != "cold":
        for _ in range(3):
            one()
    assert garbage_of(one, 1 if state == "interpreted" else 4) == []


def test_replayed_steps_leave_no_garbage():
    model, optimizer = parts()
    replayed = replay(lambda: step(model, optimizer))
    for _ in range(6):
        replayed()
    assert garbage_of(replayed) == []


def test_a_dropped_replay_leaves_no_garbage():
    """Nor does what it has looked at: a model, an optimizer, numbers that it read."""

    def train_for_a_while():
        model, optimizer = parts()
        it = {"state": torch.zeros(3)}

        @replay
        def replayed(scale):
            it["state"] = it["state"] * scale + 1
            loss = step(model, optimizer)
            return loss, loss.item(), it["state"][1:], torch.rand(2)

        for i in range(8):
            replayed(0.5 + i)
        assert replayed.n_replayed > 1, replayed.obstacle

    assert garbage_of(train_for_a_while, 1) == []


def test_a_wrapped_model_is_unwrapped_after_steps_at_once():
    model, optimizer = parts()
    wrap(model)
    gc.disable()
    try:
        for _ in range(3):
            local.trace.policy.cold = COLD
            step(model, optimizer)
        local.trace.policy.cold = 0
        unwrap(model)
    finally:
        gc.enable()
    assert type(model[0].weight) is torch.nn.Parameter


class Freed:
    """Freed by the garbage collector alone, wherever it runs. Its finalizer calls ops."""

    total = torch.zeros(3)

    def __init__(self):
        self.itself, self.grad = self, torch.ones(3)

    def __del__(self):
        self.total.add_(self.grad)


def freed_by(make, thresholds):
    """How many objects were freed, and what their finalizers counted."""
    gc.collect()
    gc.freeze()
    before, n = gc.get_threshold(), 0
    Freed.total.zero_()
    try:
        for threshold in thresholds:  # the collector comes at another place each time
            step = make()
            for _ in range(4):
                gc.disable()
                gc.collect()
                # lists that Python uses again don't bring the collector
                full: list[list[int]] = [[] for _ in range(100)]
                Freed()
                n += 1
                gc.set_threshold(threshold)
                gc.enable()
                step()
                del full
    finally:
        gc.set_threshold(*before)
        gc.unfreeze()
    gc.collect()
    return n, Freed.total[0].item()


def test_what_finalizers_record_as_a_block_with_options_begins_is_not_lost():
    def step():
        with lazy_mode(record="always"):
            return torch.ones(2) * 2

    n, counted = freed_by(lambda: step, range(1, 130))
    assert n == counted


def test_what_finalizers_record_as_a_replay_records_is_not_lost():
    def make():
        f = replay(lambda x: x * 2 + 1)
        return lambda: f(torch.ones(2))

    n, counted = freed_by(make, range(100, 3000, 50))
    assert n == counted
