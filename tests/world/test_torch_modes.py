"""torch's own modes and tracers around ours: what is theirs is never recorded."""

import pytest
import torch
from torch import nn
from torch._functorch.aot_autograd import aot_function
from torch._functorch.compilers import nop
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.func import functionalize, linearize
from torch.fx.experimental.proxy_tensor import make_fx
from torch.nn.attention.flex_attention import create_block_mask, flex_attention

from lazy_tensor import is_lazy, lazy_mode, materialize, stats
from lazy_tensor.dispatch.trie.trace import local
from tests.invariants.compare import WAYS, assert_same, lazily

pytestmark = [
    pytest.mark.filterwarnings("ignore:.torch.jit.script. is deprecated:DeprecationWarning"),
    pytest.mark.filterwarnings("ignore:Attempted to insert a get_attr Node:UserWarning"),
    pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile:UserWarning"),
    pytest.mark.filterwarnings("ignore:.isinstance.treespec, LeafSpec.:FutureWarning"),
]


def model():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(3, 4), nn.ReLU(), nn.Linear(4, 2))


def test_fake_tensors_inside_the_mode():
    with lazy_mode():
        with FakeTensorMode() as mode:
            assert type(torch.ones(3) * 2) is FakeTensor
            assert type(nn.Linear(2, 2)(torch.ones(1, 2))) is FakeTensor
        fake = mode.from_tensor(torch.ones(3) * 2)
        assert type(fake * 2) is FakeTensor
        assert stats()["ops"] + len(local.trace.state.steps()) > 0
        assert (torch.ones(3) * 2).tolist() == [2.0, 2.0, 2.0]  # recorded again


def test_fake_tensors_around_the_mode():
    with FakeTensorMode(), lazy_mode():
        assert type(torch.ones(3) * 2) is FakeTensor


@pytest.mark.recorded
def test_the_mode_records_again_after_fake_tensors_that_failed():
    with lazy_mode():
        with pytest.raises(RuntimeError), FakeTensorMode():
            torch.ones(3) @ torch.ones(4)
        y = torch.ones(3) * 2
        assert local.trace.state.n_ops == 2
        assert y.tolist() == [2.0, 2.0, 2.0]


def test_shapes_that_are_found_through_inference_mode():
    """affine_grid's meta function enters it, while what is pending waits."""

    def program():
        theta = torch.eye(3, 4).repeat(2, 1, 1) * 2
        return nn.functional.affine_grid(theta, [2, 1, 1, 4, 5], align_corners=False)

    assert_same(lazily("mode", program), program())


def test_functionalization():
    def program(x):
        y = x.clone()
        y.add_(1)
        return y * 2

    with lazy_mode():
        assert functionalize(program)(torch.ones(3)).tolist() == [4.0, 4.0, 4.0]
        assert functionalize(program)(torch.ones(3) * 2).tolist() == [6.0, 6.0, 6.0]


def test_aot_function():
    compiled = aot_function(lambda x: (x * 2).sin().sum(), nop)
    x = torch.ones(3, requires_grad=True)
    with lazy_mode():
        compiled(x).backward()
        y = torch.ones(3) * 3
        assert compiled(y).item() == pytest.approx((y * 2).sin().sum().item())
    assert torch.equal(materialize(x.grad), 2 * torch.cos(torch.ones(3) * 2))


@pytest.mark.parametrize("way", WAYS)
def test_captured_lazy_tensors_are_constants_with_their_values(way):
    def program(w):
        w = w * 2
        _, push = linearize(lambda x: (x * w).sin(), torch.ones(3))
        traced = make_fx(lambda x: x * w)(torch.ones(3))
        return push(torch.ones(3)), traced(torch.ones(3) * 3)

    assert_same(lazily(way, program, torch.ones(3)), program(torch.ones(3)))


@pytest.mark.parametrize("strict", [False, True])
@pytest.mark.parametrize("made_inside", [False, True])
def test_export(strict, made_inside):
    x = torch.ones(2, 3)
    net = model()
    expected = net(x)
    with lazy_mode():
        if made_inside:
            net = model()
        exported = torch.export.export(net, (torch.ones(2, 3),), strict=strict)
        decomposed = exported.run_decompositions()
        found = exported.module()(x), decomposed.module()(x)
    for one in materialize(found):
        assert torch.equal(one, expected)


@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
@pytest.mark.parametrize("way", WAYS)
def test_whole_graphs_of_lazy_arguments(backend, way):
    torch._dynamo.reset()
    compiled = torch.compile(lambda x, y: (x * 2 + y).sin(), fullgraph=True, backend=backend)

    def program(x):
        return compiled(x * 2, torch.ones(3))

    assert_same(lazily(way, program, torch.ones(3)), torch.sin(torch.ones(3) * 5))


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor:UserWarning")
def test_a_compiled_layer_trains():
    torch._dynamo.reset()

    def program(layer, head):
        x = torch.ones(2, 3, requires_grad=True)
        for _ in range(2):
            head(layer(x * 2)).square().sum().backward()
        return [x.grad, *(p.grad for p in (*layer.parameters(), *head.parameters()))]

    layer, head = model(), nn.Linear(2, 1)
    expected = [g.clone() for g in program(layer, head)]
    for p in (*layer.parameters(), *head.parameters()):
        p.grad = None
    compiled = torch.compile(layer, fullgraph=True, backend="aot_eager")
    with lazy_mode():
        found = program(compiled, head)
    for one, other in zip(materialize(found), expected, strict=True):
        torch.testing.assert_close(one, other)


def test_flex_attention():
    q = torch.randn(1, 2, 16, 8)

    def score(s, b, h, i, j):
        return s + (i - j)

    expected = flex_attention(q, q, q, score_mod=score)
    with lazy_mode():
        found = flex_attention(q, q, q, score_mod=score)
        mask = create_block_mask(lambda b, h, i, j: i >= j, 1, 1, 16, 16, device="cpu")
        causal = flex_attention(q * 1, q, q, block_mask=mask)
    assert torch.equal(materialize(found), expected)
    by_hand = nn.functional.scaled_dot_product_attention(q, q, q, is_causal=True)
    torch.testing.assert_close(materialize(causal), by_hand)


def test_nested_tensors():
    def program():
        parts = [torch.ones(2, 3) * 2, torch.ones(4, 3) * 3]
        jagged = torch.nested.nested_tensor(parts, layout=torch.jagged)
        torch.manual_seed(0)
        linear = nn.Linear(3, 3)
        shared = torch.nested.as_nested_tensor(parts, layout=torch.jagged)
        return [*linear(jagged).unbind(), (shared * 2).values(), jagged.sum(1)]

    assert_same(lazily("mode", program), program())


class Scale:
    def __init__(self):
        self.of = {"all": torch.ones(3) * 2}


class Scaled(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.scale = Scale()

    def forward(self, x):
        return x * self.scale.of["all"][0]


@pytest.mark.recorded
def test_tensors_that_an_exported_program_holds_in_objects():
    with lazy_mode():
        module = Scaled()
        exported = torch.export.export(module, (torch.ones(3),))
        assert exported.module()(torch.ones(3)).tolist() == [2.0] * 3
        assert is_lazy(module.scale.of["all"])


# dynamo asks each tensor for its `grad`: the plain alias of a leaf is no leaf
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")
def test_tensors_that_a_compiled_function_holds_in_its_closure():
    with lazy_mode():
        leaf = torch.full((3,), 2.0, requires_grad=True)
        scale = Scale()

        def scaled(x):
            return x * leaf[0] * scale.of["all"]

        compiled = torch.compile(scaled, backend="eager", fullgraph=True)
        for n in range(1, 3):
            y = compiled(torch.ones(3))
            y.sum().backward()
            assert y.tolist() == [4.0] * 3
            assert leaf.grad is not None
            assert leaf.grad.tolist() == [6.0 * n, 0, 0]
            with torch.no_grad():
                leaf.mul_(1)
    torch._dynamo.reset()
