"""What messages call things: the user's calls as causes of flushes, reasons, articles."""

from __future__ import annotations

import copy
import io
import pickle

import pytest
import torch

import lazy_tensor
from lazy_tensor import lazy_mode, stats
from lazy_tensor.dispatch.ops import rules
from lazy_tensor.dispatch.ops.schema import facts_of
from lazy_tensor.dispatch.wording import USERS_NAMES, call_name, op_name, with_article

aten = torch.ops.aten

CALLS = {
    ".item()": lambda x: x.sum().item(),
    "float()": lambda x: float(x.sum()),
    "int()": lambda x: int(x.sum()),
    "bool()": lambda x: 1 if (x.sum() > 0) else 0,
    "a tensor as an index": lambda x: [0] * 99 and range(x.sum().long()),
    ".tolist()": lambda x: x.tolist(),
    ".numpy()": lambda x: x.numpy(),
    "print()": lambda x: repr(x),
    ".data_ptr()": lambda x: x.data_ptr(),
    "copy.deepcopy()": lambda x: copy.deepcopy(x),
    "pickle, or torch.save()": lambda x: torch.save(x, io.BytesIO()),
    "materialize()": lambda x: lazy_tensor.materialize(x),
    "nonzero()": lambda x: x.nonzero(),
    "unique()": lambda x: x.unique(),
    "masked_select()": lambda x: x.masked_select(x > 1),
    "indexing": lambda x: x[x > 1],
    ".to_sparse()": lambda x: x.to_sparse(),
    "equal()": lambda x: torch.equal(x, x),
    "torch.linalg's check for errors": lambda x: torch.linalg.inv(x.view(2, 2)),
    "torch.nn.LSTM": lambda x: torch.nn.LSTM(4, 4)(x.view(1, 1, 4)),
}


@pytest.mark.parametrize("cause", CALLS)
def test_a_flush_is_called_as_the_user_calls_it(cause):
    x = torch.tensor([3.0, 1.0, 1.0, 2.0])
    with lazy_mode():
        CALLS[cause](x + 0)
    assert next(iter(stats()["flush_causes"])) == cause


def test_pickling_is_a_cause_of_its_own_name():
    x = lazy_tensor.wrap(torch.ones(2))
    pickle.dumps(x + 1)
    assert list(stats()["flush_causes"]) == ["pickle, or torch.save()"]


def test_plain_tensors_name_the_same_calls():
    x = torch.ones(2)
    with lazy_mode():
        x.add_(1)
        x.tolist()
        x.add_(1)
        x.numpy()
        y = torch.ones(2)
        y.add_(1)
        repr(y)
    assert list(stats()["flush_causes"]) == [".tolist()", ".numpy()", "print()"]


@pytest.mark.parametrize(
    ("call", "told"),
    [
        (lambda x: torch.equal(x, x), "aten.equal.default: it reads values"),
        (lambda x: x.unique(), "unique(): values decide the shape of its result"),
        (lambda x: x[x > 1], "aten.index.Tensor: an index is a mask, whose values say how many"),
        (lambda x: torch.multinomial(x, 2), "aten.multinomial.default: it draws random numbers"),
        (
            lambda x: torch.stack([x, x], out=x.new_empty(2, *x.shape)),
            "aten.stack.out: it writes into out=",
        ),
        (lambda x: x.resize_(1), "aten.resize_.default: it changes a tensor's shape or memory"),
    ],
)
def test_what_runs_at_once_says_by_which_rule(call, told):
    with lazy_mode():
        call(torch.ones(2) + 1)
    assert [reason for reason in stats()["fallbacks"] if reason.startswith(told)]


def ops_of_aten():
    for name in torch.ops.aten:
        packet = getattr(aten, name)
        yield from (getattr(packet, overload) for overload in packet.overloads())


def test_every_op_that_runs_at_once_has_a_reason():
    for op in ops_of_aten():
        if torch._C._dispatch_has_kernel(op.name()) and rules.rule_of(op) is rules.Rule.EAGER:
            assert rules.why_eager(op) != "its result is no tensor" or not (
                facts_of(op).returns_tensors
            )


def test_users_names_are_of_ops_that_exist():
    for name in USERS_NAMES:
        assert hasattr(aten, name) or hasattr(torch.ops.lazy_tensor, name)


def test_names_that_users_know_stay():
    assert op_name(aten.mm.default) == "aten.mm.default"
    assert call_name(aten.mm.default) == "mm()"
    assert op_name(aten._to_copy.default) == ".to()"
    assert call_name(aten._foreach_add.List) == "aten._foreach_add.List"
    assert call_name(torch.ops.profiler._record_function_exit._RecordFunction) == (
        "profiler._record_function_exit._RecordFunction"
    )


@pytest.mark.parametrize("noun", ["an int", "a list", "an OrderedDict", "a Tensor"])
def test_nouns_have_their_article(noun):
    assert with_article(noun.split()[1]) == noun


@pytest.mark.parametrize("function", [lazy_tensor.wrap, lazy_tensor.unwrap])
def test_wrong_arguments_are_told_with_their_article(function):
    with pytest.raises(TypeError, match=r"wrap\(\): x is an int; it takes a torch.Tensor or an nn"):
        function(3)
