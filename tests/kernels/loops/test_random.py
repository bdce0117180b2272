"""Kernels of random simple segments against eager execution."""

import random
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from lazy_tensor.kernels.backend import Declined
from lazy_tensor.kernels.backends.artifact import Steps
from lazy_tensor.kernels.backends.inductor import InductorBackend
from lazy_tensor.kernels.generic import generic_of, structure_of
from lazy_tensor.kernels.loops import nest
from lazy_tensor.kernels.loops.write import written
from lazy_tensor.kernels.service.verify import difference

INDUCTOR = InductorBackend()
Sizes = list[tuple[int, ...]]


def sizes_of(a: int, b: int, c: int) -> Sizes:
    """Sizes that can be reshaped to or broadcast with one another."""
    return [
        (a, b, c), (a * b, c), (a, b * c), (a * b * c,), (2, a // 2, b, c), (b, c), (c,), (a, b, 1),
        (a, 1, c),
    ]  # fmt: skip


SIZES = sizes_of(6, 4, 10)
OTHERS = [sizes_of(8, 6, 14), sizes_of(10, 4, 14), sizes_of(20, 5, 40), sizes_of(4, 3, 6)]
ALIKE = [sizes_of(6, 4, 14), sizes_of(6, 4, 30), sizes_of(6, 4, 6), sizes_of(6, 4, 200)]
BINARY: list[Callable[..., Tensor]] = [torch.add, torch.mul, torch.maximum, torch.sub]
REDUCTIONS: list[Callable[..., Tensor]] = [torch.sum, torch.mean, torch.amax, torch.amin]


class Program:
    """Random ops on random tensors of `values`, the same for each run of one seed, and alike for
    other sizes."""

    def __init__(self, seed: int, sizes: Sizes = SIZES) -> None:
        self.seed, self.sizes = seed, sizes

    def __call__(self, *inputs: Tensor) -> list[Tensor]:
        self._random = random.Random(self.seed)
        values = [*inputs]
        made: list[Tensor] = []
        for _ in range(self._random.randint(3, 14)):
            found = self._random.choice(self._steps)(self, values)
            if found is not None and found.dim() <= 5 and 0 < found.numel() <= 20000:
                values.append(found)
                made.append(found)
        # results without memory in common
        return [one * 1 for one in self._random.sample(made, min(3, len(made)))]

    def _dim(self, x: Tensor) -> int:
        return self._random.randrange(x.dim())

    def _below(self, n: int) -> int:
        return int(self._random.random() * n)

    def pointwise(self, values: list[Tensor]) -> Tensor:
        x = self._random.choice(values)
        ops: list[Callable[[Tensor], Tensor]] = [
            torch.sigmoid, torch.exp, torch.neg, torch.relu, lambda x: x * 0.5 + 1, torch.tanh,
            lambda x: x.clamp(-1, 1), lambda x: torch.where(x > 0, x, -x * 2),
        ]  # fmt: skip
        return self._random.choice(ops)(x).clamp(-10, 10)

    def binary(self, values: list[Tensor]) -> Tensor | None:
        x, y = self._random.choice(values), self._random.choice(values)
        try:
            torch.broadcast_shapes(x.shape, y.shape)
        except RuntimeError:
            return None
        return self._random.choice(BINARY)(x, y)

    def reduce(self, values: list[Tensor]) -> Tensor | None:
        x = self._random.choice(values)
        if x.dim() == 0:
            return None
        dims = self._random.sample(range(x.dim()), self._random.randint(1, x.dim()))
        return self._random.choice(REDUCTIONS)(x, dim=dims, keepdim=self._random.random() < 0.5)

    def softmax(self, values: list[Tensor]) -> Tensor | None:
        x = self._random.choice(values)
        return x.softmax(self._dim(x)) if x.dim() else None

    def norm(self, values: list[Tensor]) -> Tensor | None:
        x = self._random.choice(values)
        if x.dim() < 2 or x.size(-1) < 2:
            return None
        # Without the 0.5 a later sum over a row is zero but for rounding.
        return torch.nn.functional.layer_norm(x, [x.size(-1)]) + 0.5

    def view(self, values: list[Tensor]) -> Tensor | None:
        x = self._random.choice(values)
        if x.dim() == 0:
            return None
        d = self._dim(x)
        n = x.size(d)
        first = self._below(n)
        ops: list[Callable[[], Tensor]] = [
            lambda: x.transpose(d, -1), lambda: x.select(d, first), lambda: x.unsqueeze(d),
            lambda: x.narrow(d, first, n - first), lambda: x.flatten(), lambda: x.flatten(0, d),
            lambda: x.unbind(d)[-1], lambda: x.chunk(2, d)[0],
            lambda: x[..., None].expand(*x.shape, 2),
        ]  # fmt: skip
        return self._random.choice(ops)()

    def reshape(self, values: list[Tensor]) -> Tensor | None:
        x = self._random.choice(values)
        fitting = [s for s in self.sizes if torch.Size(s).numel() == x.numel()]
        return x.reshape(self._random.choice(fitting)) if fitting else None

    def join(self, values: list[Tensor]) -> Tensor | None:
        x = self._random.choice(values)
        same = [y for y in values if y.shape == x.shape]
        if x.dim() == 0:
            return None
        parts = [x, self._random.choice(same), x * 2]
        if self._random.random() < 0.5:
            return torch.stack(parts, self._random.randrange(x.dim() + 1))
        return torch.cat(parts, self._dim(x))

    def move(self, values: list[Tensor]) -> Tensor | None:
        x = self._random.choice(values)
        if x.dim() == 0:
            return None
        d = self._dim(x)
        ops: list[Callable[[], Tensor]] = [
            lambda: x.roll(1, d), lambda: x.flip(d), lambda: x.clone(),
            lambda: torch.nn.functional.pad(x, (1, 2)), lambda: x.tril() if x.dim() > 1 else x * 1,
            lambda: x.gather(d, torch.zeros_like(x, dtype=torch.int64)),
        ]  # fmt: skip
        return self._random.choice(ops)()

    def write(self, values: list[Tensor]) -> None:
        """An in-place op on a value, or on a slice of it."""
        x: Any = self._random.choice(values)
        if 0 in x.stride() and x.numel() > 1:
            return
        if x.dim() and self._random.random() < 0.6:
            d = self._dim(x)
            first = self._below(x.size(d))
            x = x.narrow(d, first, 1 + self._below(x.size(d) - first))
        kind = self._random.randrange(4)
        if kind == 0:
            x.mul_(0.5)
        elif kind == 1:
            x.add_(self._random.choice(values).sum() * 0.01)
        elif kind == 2:
            x.fill_(0.25)
        else:
            same = [y for y in values if y.shape == x.shape]
            if same:
                x.copy_(self._random.choice(same) * 0.5)

    _steps = (
        pointwise, pointwise, binary, binary, reduce, softmax, norm, view, view, reshape, join,
        move, write,
    )  # fmt: skip


pytestmark = pytest.mark.skipif(
    torch.backends.cpu.get_cpu_capability() not in ("AVX2", "AVX512"), reason="a CPU without AVX2"
)


def inputs_of(seed: int, sizes: Sizes = SIZES) -> list[Tensor]:
    draw, generator = random.Random(seed), torch.Generator().manual_seed(seed)
    # in double, so that differences of rounding are far below what a mistake makes
    return [torch.randn(draw.choice(sizes), generator=generator).double() for _ in range(3)]


def check(record: Any, seed: int) -> bool:
    """Compare one program's kernel with eager; False if the program isn't simple."""
    recorded = record(Program(seed), inputs_of(seed))
    segment = recorded.segment
    if not segment.calls or not segment.outputs:
        return False
    try:
        written(segment, torch.get_num_threads())
    except Declined:
        return False
    artifact = INDUCTOR.build_soon(segment)
    assert artifact is not None
    given = recorded.fresh()
    found = INDUCTOR.load(segment, artifact)(given, [])
    assert difference(found, recorded.results) is None, segment.text()
    assert difference(given, recorded.written) is None, segment.text()
    return True


@pytest.mark.parametrize("n_threads", [1, 2])
def test_random_programs_are_like_eager(record, n_threads, monkeypatch):
    monkeypatch.setattr(nest, "LEAST_PARALLEL", 2)
    before = torch.get_num_threads()
    torch.set_num_threads(n_threads)
    try:
        n_simple = sum(check(record, seed) for seed in range(60 * n_threads, 60 * n_threads + 60))
    finally:
        torch.set_num_threads(before)
    assert n_simple > 40


def check_sizes(record: Any, seed: int, others: list[Sizes]) -> tuple[int, int]:
    """Compare the kernel for all sizes of one program with eager; at how many sizes it is right,
    and how many had it."""
    recorded = [record(Program(seed, one), inputs_of(seed, one)) for one in (SIZES, *others)]
    segments = [one.segment for one in recorded]
    if not segments[0].calls or not segments[0].outputs or segments[0] == segments[1]:
        return 0, 0
    structures = [structure_of(one) for one in segments]
    first, second = structures[:2]
    if first is None or second is None or first.text != second.text:
        return 0, 0
    generic = generic_of([first, second], segments[1])
    artifact = INDUCTOR.build_soon(generic)
    if artifact is None:
        return 0, 0
    kernel = INDUCTOR.load(generic, artifact)
    assert isinstance(kernel, Steps)
    n_right = n_sizes = 0
    for one, structure in zip(recorded, structures, strict=True):
        if structure is None or structure.text != first.text:
            continue
        values = generic.values_of(structure)
        if values is None:
            continue
        n_sizes += 1
        if not INDUCTOR.fits(artifact, values):
            continue
        n_right += 1
        given = one.fresh()
        found = kernel.for_sizes(values, is_long=False)(given, [])
        assert difference(found, one.results) is None, (values, one.segment.text())
        assert difference(given, one.written) is None, (values, one.segment.text())
    assert INDUCTOR.fits(artifact, generic.own_values)
    return n_right, n_sizes


@pytest.mark.parametrize("others", [OTHERS, ALIKE], ids=["others", "alike"])
@pytest.mark.parametrize("n_threads", [1, 2])
def test_kernels_for_all_sizes_are_like_eager(record, n_threads, others, monkeypatch):
    monkeypatch.setattr(nest, "LEAST_PARALLEL", 2)
    before = torch.get_num_threads()
    torch.set_num_threads(n_threads)
    try:
        seeds = range(40 * n_threads, 40 * n_threads + 40)
        found = [check_sizes(record, seed, others) for seed in seeds]
    finally:
        torch.set_num_threads(before)
    n_right, n_sizes = map(sum, zip(*found, strict=True))
    assert n_right > 0.7 * n_sizes > 35, found
