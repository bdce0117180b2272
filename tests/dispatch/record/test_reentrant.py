"""Ops called in the middle of a hit: by a signal's handler, or by a finalizer."""

import threading
import time

import torch

import lazy_tensor
from lazy_tensor import lazy_mode, materialize, wrap
from lazy_tensor.dispatch.metadata import infer
from lazy_tensor.dispatch.record import extend_trie
from lazy_tensor.dispatch.trie.trace import local
from tests.processes import run_python

PROGRAM = """
import torch
import lazy_tensor
from lazy_tensor.dispatch.trie import tensor_types

lazy_tensor.configure(record="always", backend="aten")
new_wrapper, others, depth = tensor_types.new_wrapper, [], 0


def interrupted(*arguments):
    # what runs between the look-up of a call and its step: other ops, and sometimes a flush
    global depth
    if depth == 0:
        depth += 1
        others.append(torch.full((2,), float(len(others))) * 2)
        if len(others) % 4 == 0:
            lazy_tensor.flush()
        depth -= 1
    return new_wrapper(*arguments)


def program(x, n):
    y = x * (1.0 + n * 1e-3)
    z = y.sin() + 0.5
    x.add_(0.25)
    a, b = z.split([2, 3])
    x.add_(z.sum(), alpha=1e-3)
    return y.exp() * 0.5, a, b


x, eager = torch.linspace(0, 1, 5), torch.linspace(0, 1, 5)
for n in range(60):
    if n == 10:
        tensor_types.new_wrapper = interrupted
    with lazy_tensor.lazy_mode():
        made = program(x, n)
    expected = program(eager, n)
    assert torch.equal(x, eager), n
    for got, right in zip(made, expected):
        assert torch.equal(lazy_tensor.materialize(got), right), n
values = [lazy_tensor.materialize(t).tolist() for t in others]
assert values == [[2.0 * i] * 2 for i in range(len(others))]
print(len(others), "hits interrupted")
"""


def test_a_hit_in_python_may_be_interrupted_by_other_ops():
    shown = run_python("-c", PROGRAM, LAZY_TENSOR_HITS="python")
    assert int(shown.split()[0]) > 100


def test_another_thread_waits_for_a_call_in_which_others_are_recorded(monkeypatch):
    """Those of a finalizer, say: another thread would run half of what the first is recording."""
    waited: list[threading.Thread] = []
    others: list[torch.Tensor] = []
    wrapped = wrap(torch.ones(2))

    def interrupted(*arguments):
        if not waited:
            thread = threading.Thread(target=materialize, args=(pending,))
            waited.append(thread)
            thread.start()
            while not local.trace.claimed:
                time.sleep(1e-3)
            others.append(wrapped * 2)
            thread.join(0.2)
            assert thread.is_alive()
        return infer.propagate(*arguments)

    monkeypatch.setattr(extend_trie, "propagate", interrupted)
    lazy_tensor.cache_clear()
    x = torch.arange(4.0)
    with lazy_mode():
        pending = x + 1
        found = materialize(pending.cumsum(0))
    waited[0].join()
    assert torch.equal(found, (x + 1).cumsum(0))
    assert others[0].tolist() == [2, 2]


def test_what_is_recorded_may_be_run_while_a_meta_function_runs(monkeypatch):
    """A finalizer may run in it, and read a value."""

    def interrupted(*arguments):
        lazy_tensor.flush()
        return infer.propagate(*arguments)

    monkeypatch.setattr(extend_trie, "propagate", interrupted)
    lazy_tensor.cache_clear()
    x = torch.arange(12.0)
    with lazy_mode():
        rows = [x[i : i + 3] for i in range(3)]
        found = materialize(torch.stack(rows).cumsum(0) + rows[1])
    assert torch.equal(found, torch.stack([x[i : i + 3] for i in range(3)]).cumsum(0) + x[1:4])
