"""While nothing is recorded, ops on wrapped tensors run below Python, and give what they give
in eager."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import nn

from lazy_tensor import LazyTensor, lazy_mode, materialize, unwrap, wrap
from lazy_tensor.dispatch.run import hits
from lazy_tensor.dispatch.trie.trace import local
from tests.invariants.compare import assert_same


@pytest.fixture(autouse=True)
def cold() -> Iterator[None]:
    if hits.native is None:
        pytest.skip(hits.status())
    policy = local.trace.policy
    policy.cold, policy.calls_left = 1, 0
    yield
    policy.reset()


@pytest.fixture
def in_python(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The ops that reach `__torch_dispatch__`."""
    seen: list[str] = []
    dispatch: Any = LazyTensor.__torch_dispatch__

    def noted(cls: Any, func: Any, *args: Any) -> Any:
        seen.append(str(func))
        return dispatch.__func__(cls, func, *args)

    monkeypatch.setattr(LazyTensor, "__torch_dispatch__", classmethod(noted))
    return seen


A, B = torch.arange(12.0).reshape(3, 4), torch.arange(12.0).reshape(3, 4).flip(0)

PROGRAMS: dict[str, Callable[[torch.Tensor, torch.Tensor], Any]] = {
    "pointwise": lambda a, b: a * b + 1 - a.exp() / 2,
    "in place": lambda a, b: (a.add_(b).mul_(2), a),
    "in place through a view": lambda a, b: (a[1].zero_(), a.t()[0].add_(b[:, 0]), a),
    "views": lambda a, b: [*a.split(2), a.expand(2, 3, 4), b.t(), b[1:, ::2], a.detach()],
    "reduction": lambda a, b: (a.sum(), b.mean(0), a.max(1), a.argmax(), a.std()),
    "product": lambda a, b: (a @ b.t(), torch.bmm(a[None], b.t()[None]), torch.mv(a, b[0])),
    "lists": lambda a, b: (torch.cat([a, b]), torch.stack([a, b], 1), torch.block_diag(a, b)),
    "foreach": lambda a, b: torch._foreach_add([a, b], [b, a], alpha=2),
    "foreach in place": lambda a, b: (torch._foreach_mul_([a, b], 2.0), a, b),
    "index": lambda a, b: (a[torch.tensor([2, 0])], a[b > 3], a.masked_fill(b > 3, -1)),
    "index put": lambda a, b: (a.index_put_((torch.tensor([0]),), b[1]), a),
    "a tensor that comes back": lambda a, b: (a.contiguous() is a, a.to(a.dtype) is a, a),
    "numbers": lambda a, b: (a.sum().item(), bool(b[0, 0] > 1), float(a[0, 0])),
    "dtypes": lambda a, b: (a.to(torch.float64), b > a, a.long() // 2, torch.complex(a, b)),
    "conjugate": lambda a, b: torch.complex(a, b).conj() * 2,
    "of a conjugate": lambda a, b: torch.complex(a, b).conj().imag + 1,
    "copies": lambda a, b: (a.copy_(b), a.copy_(b[0]), b.clone(), a),
    "sizes": lambda a, b: (a.t_(), a.size(0), b.resize_(2, 2), b.size(1)),
    "out": lambda a, b: (torch.add(a, b, out=torch.empty(3, 4)), torch.mul(a, 2, out=b), b),
    "sparse": lambda a, b: (a.to_sparse().coalesce().values(), b.to_sparse().to_dense()),
    "linear algebra": lambda a, b: torch.linalg.qr(a),
    "plain and lazy": lambda a, b: (a + B, B * b, a.add_(B), torch.where(B > 2, a, b)),
    "norm": lambda a, b: nn.functional.layer_norm(a, (4,), b[0], b[1]),
    "attention": lambda a, b: nn.functional.scaled_dot_product_attention(a[None], b[None], a[None]),
    "convolution": lambda a, b: nn.functional.conv1d(a[None], b[None, :, :3].expand(2, 3, 3)),
}  # fmt: skip


@pytest.mark.parametrize("inference", [False, True], ids=["", "inference"])
@pytest.mark.parametrize("name", PROGRAMS)
def test_results_are_eagers(name: str, inference: bool) -> None:
    program = PROGRAMS[name]
    with torch.inference_mode(inference):
        expected = program(A.clone(), B.clone())
        got = program(wrap(A.clone()), wrap(B.clone()))
    assert local.trace.state is local.trace.root
    assert_same(got, expected)


def test_ops_that_need_no_care_stay_below_python(in_python: list[str]) -> None:
    def step() -> torch.Tensor:
        y = torch.stack([a * b, a.t().contiguous().t()]).sum(0)
        return y.add_(1).relu().view(12)[2:].softmax(0)

    a, b = wrap(A.clone()), wrap(B.clone())
    step()
    in_python.clear()
    y = step()
    assert in_python == []
    assert type(y) is LazyTensor


def test_ops_on_sparse_and_lazy_tensors_stay_below_python(in_python: list[str]) -> None:
    rows = torch.diag(torch.ones(4))[:3].to_sparse()
    a, b = A.clone(), wrap(A.clone())
    b.add_(0)
    in_python.clear()
    for tensor in (a, b):
        tensor.add_(rows, alpha=2)
        tensor.mul_(tensor.sparse_mask(rows).to_dense())
        tensor += torch.sparse.mm(rows, tensor.t().exp())[:, :1]
    assert in_python == []
    assert_same(b, a)
    assert b._version == a._version + 1


def test_training_is_eagers(in_python: list[str]) -> None:
    def train(model: nn.Module, x: torch.Tensor) -> list[torch.Tensor]:
        optimizer = torch.optim.Adam(model.parameters(), lr=0.1, foreach=True)
        for _ in range(4):
            optimizer.zero_grad()
            in_python.clear()
            model(x).square().mean().backward()
            optimizer.step()
        return [*model.parameters(), *model.buffers()]

    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.GELU(), nn.Linear(8, 2))
    other = copy.deepcopy(model)
    expected = train(model, A)
    got = train(wrap(other), A)
    assert not in_python
    assert_same(list(map(materialize, got)), expected)
    assert all(type(p) is nn.Parameter for p in unwrap(other).parameters())


def test_versions_are_counted() -> None:
    a = wrap(A.clone()).requires_grad_()
    y = a.exp()
    z = y * y
    y.add_(1)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        z.sum().backward()
    b, c = wrap(A.clone()), wrap(A.clone())
    torch._foreach_add_([b, c], 1)
    assert b._version == c._version == 1


def test_what_failed_says_so_again() -> None:
    a, b = wrap(A.clone()), wrap(torch.ones(5))
    for _ in range(2):
        with pytest.raises(RuntimeError, match="must match the size"):
            a + b
    assert_same(a + 1, A + 1)


def test_in_the_mode_results_are_plain_beside_lazy_arguments() -> None:
    a = wrap(A.clone())
    with lazy_mode():
        local.trace.policy.cold = 1
        y = a + 1
        assert a.add_(1) is a
    assert type(y) is torch.Tensor
    assert_same((y, a), (A + 1, A + 1))


def test_what_is_pending_is_not_run_past() -> None:
    policy = local.trace.policy
    policy.cold = 0
    a = wrap(A.clone())
    y = a * 2
    policy.cold = 1
    assert_same((y + a, a.add_(1), y), (A * 3, A + 1, A * 2))


def test_a_write_to_what_is_wrapped_is_seen() -> None:
    plain = A.clone()
    a = wrap(plain)
    plain.add_(1)
    y = a * 2
    a.mul_(3)
    assert_same((y, plain), ((A + 1) * 2, (A + 1) * 3))
