"""Version counters: what was written after autograd saved it is refused at backward."""

import pytest
import torch

from lazy_tensor import is_pending, stats, wrap
from tests.invariants.compare import WAYS, assert_agrees, lazily

each_way = pytest.mark.parametrize("way", WAYS)


def leaf(x):
    return x.detach().requires_grad_()


WRITES_TO_SAVED = {
    "the result": lambda y, x: y.add_(1),
    "a view of the result": lambda y, x: y[0].add_(1),
    "the result by another name": lambda y, x: y.detach().zero_(),
    "the result by copy_": lambda y, x: y.copy_(x),
    "the result in a list": lambda y, x: torch._foreach_mul_([y, x], 2.0),
}


@pytest.mark.parametrize("write", WRITES_TO_SAVED.values(), ids=WRITES_TO_SAVED.keys())
@each_way
def test_a_saved_tensor_that_was_written_is_refused_with_eagers_message(write, way):
    def program(x):
        y = leaf(x).exp()
        z = y * 2
        with torch.no_grad():
            write(y, x)
        with pytest.raises(RuntimeError, match="modified by an inplace operation") as raised:
            z.sum().backward()
        return str(raised.value).replace("LazyFloatTensor", "FloatTensor")

    assert_agrees(way, program, torch.rand(3, 4))


@each_way
def test_a_saved_tensor_written_through_data_is_not_refused(way):
    def program(x):
        x = leaf(x)
        y = x.exp()
        y.data.mul_(2)
        y.sum().backward()
        return x.grad

    assert_agrees(way, program, torch.rand(3, 4))


@each_way
def test_versions_count_as_in_eager(way):
    def program(x):
        y, versions = x + 1, []
        view, alias = y[0], y.detach()
        for write in (lambda: y.add_(1), lambda: view.mul_(2), lambda: alias.zero_(),
                      lambda: y.data.add_(1),
                      lambda: y.copy_(x), lambda: y.__setitem__(0, 5.0)):  # fmt: skip
            write()
            versions.append((y._version, view._version, alias._version))
        return versions

    x = torch.rand(3, 4)
    assert lazily(way, program, x.clone()) == program(x.clone())


@pytest.mark.parametrize("foreach", [False, True])
@each_way
def test_a_parameter_stepped_between_forward_and_backward_is_refused(foreach, way):
    parameters = torch.nn.ParameterList([torch.ones(3)])

    def program(*_):
        p = parameters[0]
        loss = (p * p).sum()
        p.grad = p.detach() * 1
        torch.optim.SGD([p], 0.1, foreach=foreach).step()
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            loss.backward()

    program()
    if way == "wrap":
        wrap(parameters)
    lazily(way, program)


@each_way
def test_versions_count_writes_to_lists_as_in_eager(way):
    def program(x):
        y = x + 1
        torch._foreach_add_([y, x], 1)
        torch._foreach_mul_([y], 2.0)
        return y._version, x._version

    x = torch.rand(3, 4)
    assert lazily(way, program, x.clone()) == program(x.clone())


def test_asking_for_gradients_and_versions_runs_nothing():
    p = wrap(torch.nn.ParameterList([torch.nn.Parameter(torch.rand(3))]))[0]
    loss = p.exp().sum()
    loss.backward()
    assert (loss._version, p.grad.shape, p.grad.requires_grad, loss.requires_grad) == (
        0, (3,), False, True
    )  # fmt: skip
    assert is_pending(p.grad)
    assert stats()["flushes"] == 0
