"""Programs made of one sample of an op between pointwise ops, so that it is fused with them.

In: an `OpInfo` and a `SampleInput`. Out: a `Program` with the tolerance of PyTorch's own tests.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.testing._internal.common_device_type import toleranceOverride
from torch.utils import _pytree as pytree

from tests.conformance.op_programs import Arguments, fresh, gradients
from tests.conformance.ways import Program, Tolerance

DEFAULTS = {
    torch.float32: Tolerance(1.3e-6, 1e-5),
    torch.bfloat16: Tolerance(1.6e-2, 1e-5),
    torch.float16: Tolerance(1e-3, 1e-5),
}
"""As torch.testing.assert_close has them."""
LEAST = {
    torch.int64: DEFAULTS[torch.float32],
    torch.bool: DEFAULTS[torch.float32],
    torch.bfloat16: Tolerance(3.2e-2, 1.6e-2),
}
"""Where ops on integers and booleans give floats, those are float32. Eager rounds bfloat16 after
each op, a kernel once: each is as far from what is exact as they are from each other."""


def program_of(op: Any, sample: Any, dtype: torch.dtype) -> Program:
    def run(given: Arguments) -> Any:
        tensor, args, kwargs = pytree.tree_map_only(torch.Tensor, same, given)
        result = pytree.tree_map_only(torch.Tensor, same, op(tensor, *args, **kwargs))
        return result, gradients(result, given)

    least, given = LEAST.get(dtype, Tolerance(0, 0)), tolerance_of(op, dtype)
    allowed = Tolerance(max(least.rtol, given.rtol), max(least.atol, given.atol))
    return Program(lambda: fresh(sample), run, tolerance=allowed)


def same(tensor: torch.Tensor) -> torch.Tensor:
    """A tensor equal to `tensor` by two pointwise ops, if its dtype is one that kernels take."""
    if tensor.layout is not torch.strided or tensor.is_complex():
        return tensor
    if tensor.dtype is torch.bool:
        return tensor.logical_not().logical_not()
    return tensor.neg().neg()


def together(programs: list[Program]) -> Program:
    """One program that does what all of `programs` do, for which one kernel can be compiled.

    Only what is connected is compiled as one: hence the count, of all elements that aren't NaN.
    """

    def run(given: list[Any]) -> Any:
        results = [program.run(one) for program, one in zip(programs, given, strict=True)]
        count = torch.zeros(3, dtype=torch.int64)
        for leaf in pytree.tree_leaves(results):
            if isinstance(leaf, torch.Tensor) and leaf.layout is torch.strided:
                count = count + leaf.eq(leaf).sum()
        return results, count

    return programs[0]._replace(prepare=lambda: [p.prepare() for p in programs], run=run)


def tolerance_of(op: Any, dtype: torch.dtype) -> Tolerance:
    """The default of `dtype`, or the widest that the database's entry gives it."""
    rtol, atol = DEFAULTS.get(dtype, Tolerance(0, 0))
    for entry in op.decorators:
        for decorator in getattr(entry, "decorators", (entry,)):
            if isinstance(decorator, toleranceOverride) and dtype in decorator.d:
                given = decorator.d[dtype]
                rtol, atol = max(rtol, given.rtol), max(atol, given.atol)
    return Tolerance(rtol, atol)
