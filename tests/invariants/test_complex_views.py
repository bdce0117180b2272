"""Views of complex tensors: written through, and their `conj` and `neg` bits."""

import pytest
import torch

from lazy_tensor import lazy_mode, replay, stats
from tests.invariants.compare import WAYS, assert_agrees, assert_same, lazily

START = torch.tensor([1 + 2j, 3 - 4j, -5 + 6j])

VIEWS = {
    "conj": torch.conj,
    "imag": lambda z: z.imag,
    "real": lambda z: z.real,
    "conj imag": lambda z: z.conj().imag,
    "slice of conj": lambda z: z.conj()[1:],
    "view_as_real": torch.view_as_real,
    "neg view": lambda z: torch._neg_view(z),
    "mH": lambda z: z.unsqueeze(0).mH,
    "conj twice": lambda z: z.conj().conj(),
}
each_view = pytest.mark.parametrize("view", VIEWS.values(), ids=VIEWS.keys())
each_way = pytest.mark.parametrize("way", WAYS)
both_times = pytest.mark.parametrize("flushed", [False, True], ids=["pending", "flushed"])


@each_view
@both_times
@each_way
def test_a_write_through_the_view_reaches_the_base(view, flushed, way):
    def program(z):
        base = z * 1
        seen = base + 0
        v = view(base)
        if flushed:
            v.sum().item()
        v.mul_(3)
        return seen, base + 0, v.sum()

    assert_agrees(way, program, START)


@each_view
@each_way
def test_a_write_through_the_view_reaches_an_input(view, way):
    def program(z):
        view(z).add_(1)
        return z + 0

    assert_agrees(way, program, START)


@each_view
@both_times
@each_way
def test_a_write_to_the_base_reaches_the_view(view, flushed, way):
    def program(z):
        base = z * 1
        v = view(base)
        if flushed:
            v.sum().item()
        base[0] = 9 + 9j
        return v + 0

    assert_agrees(way, program, START)


@each_view
@both_times
@each_way
def test_the_bits_are_eagers(view, flushed, way):
    def program(z):
        v = view(z * 1)
        if flushed:
            v.sum().item()
        return v.is_conj(), v.is_neg(), v.dtype, v.stride(), v.storage_offset()

    assert lazily(way, program, START.clone()) == program(START)


@each_view
@each_way
def test_a_materialized_view_has_its_value(view, way):
    assert_agrees(way, lambda z: view(z * 1).resolve_conj().resolve_neg(), START)


@each_way
def test_the_memory_of_a_clone_of_a_view_is_its_own(way):
    def program(z):
        return [torch.view_as_real(z.conj().resolve_conj()), z.conj().clone().view(torch.float32)]

    for _ in range(3):  # as steps of a plan, too
        assert_agrees(way, program, START)


@each_way
def test_a_view_is_read_by_hosts_as_its_value(way):
    def program(z):
        v = (z * 1).conj()
        return v.tolist(), v.resolve_conj().numpy().tolist(), v.imag.tolist(), str(v)

    assert_agrees(way, program, START)


@each_way
def test_gradients_flow_through_conjugation(way):
    def program(z):
        z = z.detach().requires_grad_()
        loss = (z.conj() * z).real.sum() + z.imag.pow(3).sum()
        return torch.autograd.grad(loss, z)

    assert_agrees(way, program, START)


@both_times
@each_way
def test_a_conjugate_is_not_viewed_as_real_numbers(flushed, way):
    def program(z):
        v = (z * 1).conj()
        if flushed:
            v.sum().item()
        with pytest.raises(RuntimeError) as raised:
            torch.view_as_real(v)
        return str(raised.value)

    assert lazily(way, program, START.clone()) == program(START)


@each_way
@pytest.mark.parametrize("number", [1 + 2j, 0.1 - 0.3j], ids=str)
@pytest.mark.parametrize("shape", [(2,), ()], ids=["vector", "scalar"])
def test_the_gradient_of_a_product_with_a_complex_number(number, shape, way):
    """Its formula conjugates the number: a view whose only argument is a Python number."""

    def program(z):
        (z * number).abs().sum().backward()
        return z.grad

    assert_agrees(way, program, torch.full(shape, 0.7 - 1.3j).requires_grad_())


@pytest.mark.parametrize("options", [{"record": "always"}, {"debug": True}, {}], ids=str)
def test_a_view_of_a_python_number(options):
    conj = torch.ops.aten._conj.default
    for _ in range(3):
        with lazy_mode(**options):
            got = conj(1 + 2j)
        assert_same(got, conj(1 + 2j))


def test_a_complex_number_in_a_replayed_step():
    z = torch.full((2,), 0.7 - 1.3j).requires_grad_()
    expected = z.detach().clone().requires_grad_()

    def step(z):
        z.grad = None
        (z * (1 + 2j)).abs().sum().backward()
        return z.grad + 0

    replayed = replay(step)
    for _ in range(4):
        assert_same(replayed(z), step(expected))
    assert stats()["replayed"] >= 1
