"""A kernel of each kind of op that kernels have, in a block and its flush, beside eager.

The programs are one or a few ops that users write. One that is slower than eager points to a kernel
that is built badly: by default it is measured and not used. Writes `results/ops.md`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from pytest_benchmark.fixture import BenchmarkFixture
from results_table import page
from timing import interleaved
from torch import Tensor
from torch.nn import functional as F

from lazy_tensor import lazy_mode

Program = Callable[[Tensor, Tensor], Tensor]
aten = torch.ops.aten
N = 1000
MASK = torch.rand(N, N) > 0.5


def gradient(function: Callable[[Tensor], Tensor], x: Tensor, grad: Tensor | None = None) -> Tensor:
    x = x.detach().requires_grad_()
    return torch.autograd.grad(function(x), x, grad)[0]


POINTWISE: dict[str, Program] = {
    "softplus": lambda x, y: F.softplus(x) + y,
    "elu": lambda x, y: F.elu(x) + y,
    "selu": lambda x, y: F.selu(x) + y,
    "gelu": lambda x, y: F.gelu(x) + y,
    "gelu by tanh": lambda x, y: F.gelu(x, approximate="tanh") + y,
    "silu": lambda x, y: F.silu(x) * y,
    "mish": lambda x, y: F.mish(x) + y,
    "tanh": lambda x, y: x.tanh() + y,
    "sigmoid": lambda x, y: x.sigmoid() * y,
    "logsigmoid": lambda x, y: F.logsigmoid(x) + y,
    "hardswish": lambda x, y: F.hardswish(x) + y,
    "exp, log": lambda x, y: x.exp() + y.abs().log(),
    "erf": lambda x, y: x.erf() + y,
    "sinc": lambda x, y: x.sinc() + y,
    "asinh": lambda x, y: x.asinh() + y,
    "logaddexp": lambda x, y: torch.logaddexp(x, y) + y,
    "xlogy": lambda x, y: torch.xlogy(x, y.abs()),
    "where with a function": lambda x, y: torch.where(x > 0, x, y.abs().log1p()),
    "remainder": lambda x, y: x % y + y,
    "floor_divide": lambda x, y: x // y + y,
    "atan2": lambda x, y: torch.atan2(x, y) + y,
    "x ** 2": lambda x, y: x**2 + y,
    "x ** 3": lambda x, y: x**3 + y,
    "x ** 1.5": lambda x, y: x.abs() ** 1.5 + y,
    "clamp": lambda x, y: x.clamp(-1, 1) * y,
    "nan_to_num": lambda x, y: x.nan_to_num() + y,
    "a Gaussian": lambda x, y: (-0.5 * ((x - y) / 0.3) ** 2).exp() / 0.75,
    "softplus, backward": lambda x, y: aten.softplus_backward(y, x, 1, 20) + y,
    "elu, backward": lambda x, y: aten.elu_backward(y, 1.0, 1.0, 1.0, False, x) + y,
    "gelu, backward": lambda x, y: aten.gelu_backward(y, x) + y,
    "int8 and back": lambda x, y: ((x * 9).round().clamp(-128, 127).to(torch.int8) - 1).float() * y,
}
BROADCAST: dict[str, Program] = {
    "a function of a column": lambda x, y: x * y[:, :1].tanh() + y,
    "a function of a row": lambda x, y: x * y[0].exp() + y,
    "a power of a column": lambda x, y: (x - y) * y[:, :1].abs() ** 1.3,
}
REDUCTIONS: dict[str, Program] = {
    "sum of rows": lambda x, y: (x * y).sum(1),
    "sum of columns": lambda x, y: (x * y).sum(0),
    "variance of rows": lambda x, y: (x + y).var(1),
    "greatest of rows": lambda x, y: (x * y).amax(1),
    "softmax": lambda x, y: (x * 2 + y).softmax(1),
    "log_softmax": lambda x, y: (x * 2 + y).log_softmax(1),
    "logsumexp": lambda x, y: (x + y).logsumexp(1),
    "cross-entropy": lambda x, y: F.cross_entropy(x + y, y[:, 0].abs().long()),
    "layer norm": lambda x, y: F.layer_norm(x + y, (x.shape[1],)),
    "layer norm and GELU": lambda x, y: F.gelu(F.layer_norm(x, (x.shape[1],))) + y,
    "RMS norm": lambda x, y: F.rms_norm(x + y, (x.shape[1],)),
    "normalize": lambda x, y: F.normalize(x + y, dim=1),
    "cosine similarity": lambda x, y: F.cosine_similarity(x, y, dim=1),
    "mean squared error": lambda x, y: F.mse_loss(x + y, y),
    "columns standardized": lambda x, y: (x - x.mean(0)) / (x.std(0) + 1e-5) + y,
    "std, alone": lambda x, y: x.std(1),
    "masked_fill, alone": lambda x, y: x.masked_fill(MASK[: len(x), : len(x)], 0),
    "softmax of rows of 4": lambda x, y: (x.view(-1, 4) * 2).softmax(1),
    "a share of a sum of 4": lambda x, y: x.view(4, -1) / x.view(4, -1).exp().sum(0),
    "functions of rows of 4": lambda x, y: (x.view(-1, 4) * y[0, :4]).exp() + 1,
    "a function of means": lambda x, y: x * x.mean(0).tanh() + y,
    "batch norm of columns, backward": lambda x, y: gradient(
        lambda x: F.batch_norm(x, None, None, y[0], y[1], training=True), x, y
    ),
    "KL divergence, backward": lambda x, y: gradient(
        lambda x: F.kl_div(x.log_softmax(1), y.softmax(1), reduction="batchmean"), x
    ),
    "entropy": lambda x, y: -(x.softmax(1) * (x + y).log_softmax(1)).sum(1),
}
MOVES: dict[str, Program] = {
    "roll": lambda x, y: x.roll(1, 0) + x.roll(1, 1) + y,
    "transpose": lambda x, y: (x.t() * 2).contiguous() + y,
    "cat": lambda x, y: torch.cat([x * 2, y + 1], 1) * 3,
    "pad": lambda x, y: F.pad(x * y, (1, 1, 1, 1)) * 2,
    "differences": lambda x, y: (x[1:, 1:] - x[:-1, :-1]) * y[1:, 1:],
    "tril": lambda x, y: (x * y).tril() + 1,
}
IN_BFLOAT16: dict[str, Program] = {
    f"{name}, bfloat16": program
    for name, program in {
        "gelu": POINTWISE["gelu"],
        "mish": POINTWISE["mish"],
        "focal loss": lambda x, y: ((1 - x.sigmoid()) ** 2 * F.softplus(-x)).mean(),
        "cross-entropy": REDUCTIONS["cross-entropy"],
        "softmax": REDUCTIONS["softmax"],
        "layer norm": REDUCTIONS["layer norm"],
    }.items()
}
pytestmark = pytest.mark.usefixtures("one_thread")
PROGRAMS = POINTWISE | BROADCAST | REDUCTIONS | MOVES | IN_BFLOAT16


@pytest.fixture(scope="module")
def rows(results_dir: Path) -> Iterator[list[list[str]]]:
    collected: list[list[str]] = []
    yield collected
    if len(collected) == len(PROGRAMS):
        title = f"Ops in a block of their own, {N} x {N} floats, one thread"
        columns = ["program", "eager, us", "block, us", "block / eager"]
        (results_dir / "ops.md").write_text(page(title, columns, collected))


@pytest.mark.parametrize("name", PROGRAMS)
def bench_op(benchmark: BenchmarkFixture, quick: bool, rows: list[list[str]], name: str) -> None:
    n, program = 8 if quick else N, PROGRAMS[name]
    x, y = torch.randn(2, n, n)
    y.clamp_(-n + 1, n - 1)  # its first column has places in rows
    rounding = 1e-4
    if name in IN_BFLOAT16:
        x, y, rounding = x.bfloat16(), y.bfloat16(), 0.05
    in_block = lazy_mode(record="always", compile="off" if quick else "blocking")(program)
    result, expected = in_block(x, y), program(x, y)
    # numbers of `y` may be 0, by which a remainder is NaN
    torch.testing.assert_close(result, expected, rtol=rounding, atol=rounding, equal_nan=True)
    functions = {"eager": lambda: program(x, y), "block": lambda: in_block(x, y)}
    timings = benchmark.pedantic(
        interleaved, args=(functions, 3 if quick else 15, 3), rounds=1, iterations=1
    )
    cost = [f"{timings.spread(side).median_s * 1e6:.0f}" for side in functions]
    rows.append([name, *cost, f"{timings.ratio('block', 'eager'):.2f}"])
