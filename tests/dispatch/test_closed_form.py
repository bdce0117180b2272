"""The closed forms say what the ops themselves do."""

import pytest
import torch

from lazy_tensor.dispatch.closed_form import KEEP_DTYPE, OTHERS, closed_form
from lazy_tensor.dispatch.meta import meta_of, outcome_of
from lazy_tensor.dispatch.schema import facts_of
from lazy_tensor.kernels.segment import Ref

aten = torch.ops.aten
SHAPES = [((2, 3), (2, 3), (2, 3)), ((4, 1, 3), (2, 1), (3,)), ((), (5,), (1, 1)), ((3,), (), ())]


def overloads(name):
    packet = getattr(aten, name)
    found = [getattr(packet, overload) for overload in packet.overloads()]
    return [op for op in found if not facts_of(op).is_out]


def arguments(op, shapes):
    """Tensors where the op takes tensors, small numbers where it needs numbers."""
    shapes = iter(shapes)
    args: list[object] = []
    for argument in op._schema.arguments:
        kind = str(argument.type)
        if kind == "Tensor":
            args.append(torch.rand(next(shapes)) + 0.1)
        elif kind == "Optional[number]":
            args.append(0.5)
        elif argument.has_default_value() or argument.kwarg_only:
            break
        elif kind in ("number", "float"):
            args.append(0.5)
        elif kind == "bool":
            args.append(False)
        elif kind == "int":
            args.append(1)
        else:
            return None
    return args


def check(op, args):
    tensors = [a for a in args if isinstance(a, torch.Tensor)]
    named = iter(range(len(tensors)))
    template = tuple(Ref(next(named)) if isinstance(a, torch.Tensor) else a for a in args)
    foretold = closed_form(facts_of(op), template, (), [meta_of(t) for t in tensors])
    if foretold is None:
        return False
    assert foretold == outcome_of(op(*args), facts_of(op))
    return True


@pytest.mark.parametrize("name", sorted(KEEP_DTYPE))
def test_elementwise_op_agrees_with_its_run(name):
    n_checked = 0
    names = [name] + [name + "_"] * hasattr(aten, name + "_")
    for op in [op for each in names for op in overloads(each)]:
        for shapes in SHAPES:
            args = arguments(op, shapes)
            if args is None:
                continue
            try:
                op(*[a.clone() if isinstance(a, torch.Tensor) else a for a in args])
            except (RuntimeError, TypeError, NotImplementedError, IndexError):
                continue  # not for such arguments: eager says so too
            n_checked += check(op, args)
    assert n_checked


def test_other_ops_agree_with_their_run():
    x, w, b = torch.rand(4, 3), torch.rand(3, 5), torch.rand(5)
    batch = torch.rand(2, 4, 3)
    targets = torch.tensor([0, 2, 1, 1])
    soft = x.softmax(1)
    loss = (x, targets, None, 1, -100)
    one = torch.tensor(1.0)
    calls = {
        aten.mm.default: (x, w),
        aten.bmm.default: (batch, batch.transpose(1, 2)),
        aten.addmm.default: (b, x, w),
        aten.embedding.default: (w, targets),
        aten.linalg_vector_norm.default: (x,),
        aten._softmax.default: (x, 1, False),
        aten._log_softmax.default: (x, -1, False),
        aten._softmax_backward_data.default: (x, soft, 1, torch.float32),
        aten._log_softmax_backward_data.default: (x, soft, 1, torch.float32),
        aten.nll_loss_forward.default: loss,
        aten.nll_loss_backward.default: (one, *loss, one),
    }
    assert set(calls) == set(OTHERS)
    for op, args in calls.items():
        assert check(op, list(args)), op
        assert check(op, [moved(a) if isinstance(a, torch.Tensor) else a for a in args]), op


def moved(tensor):
    """The same values, somewhere within a larger storage."""
    return torch.stack([tensor, tensor])[1]


@pytest.mark.parametrize(
    ("op", "args"),
    [
        (aten.mm.default, (torch.rand(2, 3), torch.rand(2, 3))),
        (aten.add.Tensor, (torch.rand(2, 3), torch.rand(4))),
        (aten.add_.Tensor, (torch.rand(3), torch.rand(2, 3))),
        (aten.add.Tensor, (torch.rand(2, 3), torch.ones(3, dtype=torch.int64))),
        (aten.add.Tensor, (torch.rand(2, 3).t(), torch.rand(3, 2))),
        (aten.mul.Tensor, (torch.rand(2), 1j)),
        (aten.exp.default, (torch.arange(3),)),
        (aten._softmax.default, (torch.rand(2, 3), 7, False)),
    ],
)
def test_leaves_to_others_what_it_does_not_know(op, args):
    assert not check(op, list(args))
