"""The functions that stand for aten ops in generated code, against the ops themselves."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from lazy_tensor.kernels.bindings import BINDINGS, callable_of

aten = torch.ops.aten
X, Y = torch.rand(4, 4), torch.rand(4, 4)
STACK, VECTOR = torch.rand(2, 4, 4), torch.rand(4)
ARGUMENTS: dict[Any, list[tuple[Any, ...]]] = {
    aten.as_strided.default: [(X, (2, 2), (1, 2)), (X, (2, 2), (1, 2), 3)],
    aten.expand.default: [(VECTOR, (3, 4))],
    aten.permute.default: [(STACK, (2, 0, 1))],
    aten.select.int: [(X, 0, 1)],
    aten.squeeze.dim: [(X[:1], 0)],
    aten.t.default: [(X,)],
    aten.transpose.int: [(STACK, 0, -1)],
    aten.unbind.int: [(X,), (X, 1)],
    aten.unsqueeze.default: [(X, 1)],
    aten.view.default: [(X, (2, 8)), (X, (-1,))],
    aten.addmm.default: [(VECTOR, X, Y)],
    aten.baddbmm.default: [(STACK, STACK, STACK)],
    aten.bmm.default: [(STACK, STACK)],
    aten.convolution.default: [
        (
            torch.rand(1, 2, 5, 5),
            torch.rand(3, 2, 3, 3),
            bias,
            (1, 1),
            (0, 1),
            (1, 1),
            False,
            (0, 0),
            1,
        )
        for bias in (None, torch.rand(3))
    ],
    aten.embedding.default: [(X, torch.tensor([1, 3])), (X, torch.tensor([1]), 2, False, True)],
    aten.mm.default: [(X, Y)],
    aten.mv.default: [(X, VECTOR)],
    aten.cat.default: [((X, Y),), ((X, STACK[0]), -1)],
    aten.clone.default: [(X,)],
    aten.pow.Tensor_Scalar: [(X, 2), (X, 0.5)],
    aten.where.self: [(X > 0.5, X, Y), (X > 0.5, X, torch.tensor(1.0))],
    aten.copy_.default: [(X, Y), (X, torch.arange(4)), (X, Y, True)],
    aten.mean.dim: [(X, (0,)), (X, (1,), True), (X, None)],
    aten.sum.dim_IntList: [(X, (0,)), (X, (0, 1), True), (X, None), (X, ())],
    aten.native_layer_norm.default: [(X, (4,), VECTOR, VECTOR, 1e-5), (X, (4,), None, None, 1e-5)],
    **{
        op: [(X, Y), (X, 2.0), (X, 3), (X, torch.tensor(2.0, dtype=torch.float64))]
        for op in BINDINGS
        if op._overloadname == "Tensor"
    },
    **{
        getattr(aten, name).default: [(X,)]
        for name in ("exp", "neg", "relu", "rsqrt", "sigmoid", "sqrt", "tanh")
    },
}


class Called(TorchDispatchMode):
    """What is dispatched, with its arguments."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[Any] = []

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        self.calls.append((func, len(args), kwargs))
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("op", BINDINGS, ids=str)
def test_a_function_calls_the_op_that_it_stands_for(op: Any) -> None:
    for arguments in ARGUMENTS[op]:
        found = []
        for call in (op._op, callable_of(op, by_name=False)):
            mine = [a.clone() if isinstance(a, torch.Tensor) else a for a in arguments]
            with Called() as called:
                result = call(*mine)
            assert [func for func, *_ in called.calls] == [op]
            found.append(result)
        torch.testing.assert_close(found[0], found[1], rtol=0, atol=0)


def test_arguments_by_name_go_to_the_op_itself() -> None:
    assert callable_of(aten.sum.dim_IntList, by_name=True) is aten.sum.dim_IntList._op
    assert callable_of(aten.amax.default, by_name=False) is aten.amax.default._op
