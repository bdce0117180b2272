"""Programs that random search found, each kept short under the name of what went wrong."""

import pytest
from fuzzing.program import Program
from fuzzing.sides import EXACT, difference

FOUND = {
    "a detached array's tensor was written later than its memory was read": """
v1 = wrap(torch.ones(1))
v2 = torch.from_numpy(v1.detach().numpy())
v3 = v2.detach()
v3.unsqueeze(0).add_(3)
v4 = v1.sin()""",
    "softmax had the storage offset of its input": """
v1 = wrap(torch.randn(2, 1))
v2 = F.softmax(v1[1:], 0)
v3 = v2.log_softmax(1)""",
    "a conjugate view was computed, and writes to it lost": """
v1 = wrap(torch.randn(3, dtype=torch.complex64))
v2 = v1.conj()
v2.mul_(2)
v3 = v2.imag
v3.add_(1)
flush()
v2[1:].add_(1)""",
    "zeros without memory, which autograd makes, reached a kernel": """
v1 = wrap((torch.ones((), dtype=torch.bfloat16)).requires_grad_())
v2, = torch.autograd.grad(v1.sin().sum(), v1, create_graph=True)
v3 = v2.erf().abs()
v4, = torch.autograd.grad(v3.sin().sum(), v1, create_graph=True)
(v4 * 2).mean().backward(retain_graph=True)""",
    "data shared its version with the tensor": """
v1 = wrap(torch.randn(()))
with torch.no_grad(): v1.data.neg_()""",
    "dtypes were refused at the flush only": """
v1 = wrap(torch.ones(3, dtype=torch.bool))
v2 = v1 - v1
v3 = torch.gt(v1.to(torch.complex64), 1)
v4 = v1.std()
v5 = v1.abs()
v6 = wrap(torch.randn(3, 5))[:, 1:]
with torch.no_grad(): v6.sub_(True)
v1[torch.tensor([0, 1])] = v1[0] * 2""",
    "overlapping writes were refused at the flush only": """
v1 = wrap(torch.randn(4))
v1.expand(2, 4).neg_()
v1[1:].add_(v1[:-1])
v1[torch.tensor([0, 3])] = v1[0]
v1[2:].add_(v1[:2])
v2 = wrap(torch.randn(1, 1))
v2[::2] = v2[0]
v2.unsqueeze(0).copy_(v2)
v2.view(-1).copy_(v2)
v3 = wrap(torch.randn((), dtype=torch.complex64))
v3.real.copy_(v3)""",
    "the maximum of nothing": """
v1 = wrap(torch.randn(0, 5)).view(torch.int32)
v2, v3 = v1.max(0)""",
    "values computed inside inference mode were inference tensors": """
v1 = wrap(torch.ones(2, dtype=torch.int64))
v2 = v1 == v1
with torch.inference_mode(): v3 = torch.tensor((v2 * 2 + 1).tolist())
seen.append(v1.detach().tolist())
v4 = v2.view(-1)""",
    "a long tensor's text broke its lines elsewhere": """
v1 = wrap((torch.arange(8, dtype=torch.float32) - 0.5).requires_grad_())
seen.append(repr(v1))
seen.append(repr(v1 * 1.25))
v2, v3 = torch._foreach_add([v1, v1], 1)
seen.append(repr(v3))""",
    "in bfloat16 a product of mixed layouts was laid out otherwise": """
v1 = wrap((torch.randn((3, 5, 2), dtype=torch.bfloat16)).requires_grad_())
v2, = torch.autograd.grad(v1.movedim(0, -1).square().sum(), v1)""",
    "a plain tensor was written while reads of its lazy twin waited": """
v1 = torch.randn(4); v2 = wrap(v1.detach())
v3 = v2 * 2
v1.add_(5)
v4 = v2 + 1
v2[1:].mul_(3)
seen.append(v1.tolist())""",
    "data replaced a view's and kept its offset": """
v1 = wrap(torch.randn((2, 1)))
v2, v3 = v1.chunk(2)
v3.data = v3.data * 2
v4 = v3[0]""",
    "a plain tensor that was set to lazy memory was written": """
v1 = wrap(torch.randn(3)).sin()
v2 = torch.empty(0); v2.set_(v1.detach())
v3 = v1.sin()
v2[0] = 1
v4 = torch.ones(3); v5 = wrap(torch.ones(3)); v5.set_(v4)
v6 = v5 * 2
v4.add_(1)""",
}


@pytest.mark.parametrize("name", FOUND)
@pytest.mark.parametrize("side", EXACT, ids=lambda side: side.name)
def test_agrees_with_eager(name, side):
    program = Program(tuple(FOUND[name].strip().split("\n")))
    assert difference(program, side) is None
