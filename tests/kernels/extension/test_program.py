"""Programs in C++: each kind of argument and result, what lives how long, and what is left when an
instruction raises."""

from __future__ import annotations

import threading
import time
import weakref
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from lazy_tensor.kernels.extension import program
from lazy_tensor.kernels.segment import Ref, ScalarRef

aten = torch.ops.aten
A, B, NUMBER = Ref(0), Ref(1), ScalarRef(0)
X, Y = torch.rand(4, 6), torch.rand(4, 6)
INDEX = torch.tensor([2, 0])


def one(op: Any, args: Any, n: int = 1, **kwargs: Any) -> Any:
    """A program of one call on two tensors, of whose `n` results it gives all."""
    made = tuple(range(2, 2 + n))
    call = program.call(op, args, kwargs, made, (), ())
    return program.program_of(2 + n, (0, 1), made, [call])


CALLS: dict[str, tuple[Any, tuple[Any, ...], dict[str, Any], int]] = {
    "defaults": (aten.add.Tensor, (A, B), {}, 1),
    "by name": (aten.add.Tensor, (A, B), {"alpha": 3}, 1),
    "a number for a tensor": (aten.mul.Tensor, (A, 0.5), {}, 1),
    "a number that changes": (aten.add.Scalar, (A, NUMBER), {}, 1),
    "one for a tensor": (aten.mul.Tensor, (A, NUMBER), {}, 1),
    "one in a list": (aten._foreach_add.ScalarList, ((A, B), (1, NUMBER)), {}, 2),
    "a list of tensors": (aten.cat.default, ((A, B), 1), {}, 1),
    "a list with gaps": (aten.index.Tensor, (A, (None, B)), {}, 1),
    "no tensor": (aten.native_layer_norm.default, (A, (6,), None, None, 1e-5), {}, 3),
    "a dtype": (aten._to_copy.default, (A,), {"dtype": torch.float64}, 1),
    "a memory format": (aten.clone.default, (A,), {"memory_format": torch.preserve_format}, 1),
    "a device": (aten.zeros_like.default, (A,), {"device": torch.device("cpu")}, 1),
    "text": (aten.div.Tensor_mode, (A, B), {"rounding_mode": "floor"}, 1),
    "one integer for a list": (aten.sum.dim_IntList, (A, 0), {}, 1),
    "infinity": (aten.clamp.default, (A, 0.5, float("inf")), {}, 1),
    "a list of results": (aten.unbind.int, (A,), {}, 4),
    "an undefined result": (
        aten.native_layer_norm_backward.default,
        (A, B, (6,), Ref(0), Ref(0), None, None, (True, False, False)), {}, 3),
}  # fmt: skip


@pytest.mark.parametrize("case", CALLS)
def test_a_call_gives_what_the_op_gives(case: str) -> None:
    op, args, kwargs, n = CALLS[case]
    if case == "an undefined result":
        _, mean, rstd = aten.native_layer_norm(X, (6,), None, None, 1e-5)
        made = (4, None, None)
        call = program.call(op, (A, A, (6,), Ref(1), Ref(2), *args[5:]), {}, made, (), ())
        given = program.program_of(5, (0, 1, 2), (4,), [call])((X, mean, rstd), [])
        right = op(X, X, (6,), mean, rstd, None, None, (True, False, False))[:1]
    else:
        second = INDEX if case == "a list with gaps" else Y
        given = one(op, args, n, **kwargs)((X, second), [2.5])

        def real(argument: Any) -> Any:
            if isinstance(argument, Ref):
                return (X, second)[argument.index]
            if isinstance(argument, ScalarRef):
                return 2.5
            return [real(item) for item in argument] if type(argument) is tuple else argument

        right = op(*real(args), **kwargs)
        right = (right,) if isinstance(right, torch.Tensor) else right
    for mine, theirs in zip(given, right, strict=True):
        assert mine.dtype == theirs.dtype
        assert mine.stride() == theirs.stride()
        assert torch.equal(mine, theirs)


def test_results_take_the_strides_asked_for() -> None:
    call = program.call(aten.add.Tensor, (A, A), {}, (1,), (), (), [(1, 4)])
    (found,) = program.program_of(2, (0,), (1,), [call])((X,), [])
    assert found.stride() == (1, 4)
    assert torch.equal(found, X + X)


class Looks:
    """A segment that sees what lives."""

    program = None

    def __init__(self, what: weakref.ref[torch.Tensor]) -> None:
        self.what = what
        self.found: list[bool] = []

    def run(self, tensors: Any, numbers: Any) -> tuple[torch.Tensor, ...]:
        self.found.append(self.what() is not None)
        return (tensors[0] * numbers[0],)


def test_a_leaf_goes_with_its_last_use() -> None:
    leaves = [torch.ones(2)]
    looks = Looks(weakref.ref(leaves[0]))
    made = program.program_of(
        4, (0,), (3,),
        [
            program.segment(looks, (0,), (0,), (1,), ()),
            program.call(aten.mul.Tensor, (Ref(1), A), {}, (2,), (0, 1), ()),
            program.segment(looks, (2,), (0,), (3,), (2,)),
        ],
    )  # fmt: skip
    given: list[Any] = []
    made.run(leaves, [3.0], given)
    assert leaves == []
    assert looks.found == [True, False]
    assert given[0][0].tolist() == [9.0, 9.0]


def failing() -> Any:
    """Writes, looks up, writes."""
    one_more: Any = aten.add_.Tensor, (A, 1), {}, (), (), ()
    look_up: Any = aten.index.Tensor, (A, (B,)), {}, (2,), (), ()
    return program.program_of(
        3, (0, 1), (2,), [program.call(*one_more), program.call(*look_up), program.call(*one_more)]
    )


def test_what_raises_leaves_what_came_before() -> None:
    made, x = failing(), torch.zeros(3)
    given: list[Any] = []
    with pytest.raises(IndexError, match="out of bounds"):
        made.run([x, torch.tensor([7])], [], given)
    at, values, inner = made.take_failure()
    assert (at, sorted(values), inner, given) == (1, [0, 1], -1, [])
    assert x.tolist() == [1, 1, 1]
    assert made.take_failure() is None
    values[1] = torch.tensor([2])
    for i in (1, 2):
        made.step(i, values, [])
    assert values[2].tolist() == [1]
    assert x.tolist() == [2, 2, 2]


def test_an_interrupt_as_an_observer_leaves_comes_after_the_instruction() -> None:
    class Around:
        def __enter__(self) -> None:
            pass

        def __exit__(self, *_: object) -> None:
            raise KeyboardInterrupt

    add = program.call(aten.add_.Tensor, (A, 1), {}, (), (), ())
    made, x = program.program_of(1, (0,), (0,), [add, add]), torch.zeros(2)
    with pytest.raises(KeyboardInterrupt):
        made.run([x], [], [], lambda _: Around(), None)
    failed = made.take_failure()
    assert failed is not None
    assert failed[0] == 1
    assert x.tolist() == [1, 1]


def test_which_call_of_a_segment_raised_is_known() -> None:
    inner = program.program_of(
        3, (0, 1), (2,),
        [
            program.call(aten.add_.Tensor, (A, 1), {}, (), (), ()),
            program.call(aten.index.Tensor, (A, (B,)), {}, (2,), (), ()),
        ],
        is_inner=True,
    )  # fmt: skip
    op_by_op = SimpleNamespace(program=inner)
    outer = program.program_of(3, (0, 1), (2,), [program.segment(op_by_op, (0, 1), (), (2,), ())])
    with pytest.raises(IndexError):
        outer.run([torch.zeros(3), torch.tensor([7])], [], [])
    failed = outer.take_failure()
    assert failed is not None
    assert failed[::2] == (0, 1)


def test_threads_share_a_program() -> None:
    made = one(aten.mul.Tensor, (A, NUMBER))
    wrong: list[float] = []

    def use(number: float) -> None:
        for _ in range(200):
            given: list[Any] = []
            made.run([torch.ones(64, 64), Y], [number], given)
            wrong.extend([number] if not (given[0][0] == number).all() else [])

    threads = [threading.Thread(target=use, args=(float(i),)) for i in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong


def test_other_threads_run_while_a_long_op_does() -> None:
    square = torch.rand(1500, 1500)
    spec: Any = type("", (), {"size": (1500, 1500), "dtype": torch.float32})
    call = program.call(aten.mm.default, (A, A), {}, (1,), (), (spec,))
    made = program.program_of(2, (0,), (1,), [call] * 8)
    ticks: list[float] = []
    is_over = threading.Event()

    def tick() -> None:
        while not is_over.is_set():
            ticks.append(time.monotonic())
            is_over.wait(0.001)

    thread = threading.Thread(target=tick)
    thread.start()
    began = time.monotonic()
    made.run([square], [], [])
    ended = time.monotonic()
    is_over.set()
    thread.join()
    assert [tick for tick in ticks if began < tick < ended]


def test_what_cant_be_a_program_is_refused() -> None:
    with pytest.raises(RuntimeError, match="no value for other"):
        one(aten.add.Tensor, (A,))
    with pytest.raises(RuntimeError, match="expected|Expected"):
        one(aten.add.Tensor, (A, "text"))
    with pytest.raises(TypeError, match="a list of its leaves"):
        one(aten.add.Tensor, (A, B)).run([X], [], [])
