"""Writes a script that shows that a kernel is wrong, without the program in which that was found.

In: a segment, the backend's name, and the inputs on which kernel and op-by-op execution differ.
Out: `<digest>.py`, and beside it `<digest>.pt` with the inputs. Called by `service.compile`. The
script calls `kernel_of`.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from lazy_tensor.kernels.backend import Backend, BuildsSoon, Kernel
from lazy_tensor.kernels.backends.artifact import Steps
from lazy_tensor.kernels.generic import Generic
from lazy_tensor.kernels.segment import Call, Ref, ScalarRef, Segment, TensorSpec

_SCRIPT = '''\
"""A kernel of the backend {backend!r} and op-by-op execution differ: run this to see it.

Found with torch {torch}: {reason}
The inputs lie beside this file. Ends with status 1 if they differ here too.
"""

import sys
from math import inf, nan
from pathlib import Path

import torch
from torch import device

from lazy_tensor.kernels import Call, Ref, ScalarRef, Segment, TensorSpec
from lazy_tensor.kernels.backends.aten import compile_aten
from lazy_tensor.kernels.backend import backend_of
from lazy_tensor.kernels.generic import generic_of, structure_of
from lazy_tensor.kernels.segment import op_named
from lazy_tensor.kernels.service.repro import kernel_of
from lazy_tensor.kernels.service.verify import difference_of

segment = {segment}
source = {source}
inputs = torch.load(Path(__file__).with_suffix(".pt"), weights_only=True)
kernel = kernel_of(backend_of({backend!r}), source)
reason = difference_of(kernel, compile_aten(segment), segment, inputs["tensors"], inputs["scalars"])
print(reason or "they agree")
sys.exit(reason is not None)
'''


def kernel_of(backend: Backend, source: Segment) -> Kernel:
    """The kernel that the compile service would build, for the sizes of `source`."""
    if not (isinstance(backend, BuildsSoon) and backend.can_build(source)):
        return backend.compile(source)
    artifact = backend.build_soon(source)
    if artifact is None:
        return backend.compile(source)
    kernel = backend.load(source, artifact)
    if isinstance(kernel, Steps) and isinstance(source, Generic):
        return kernel.for_sizes(source.own_values, is_long=False)
    return kernel


def write_script(
    directory: Path,
    backend: str,
    segment: Segment,
    examples: Sequence[Segment],
    inputs: tuple[Sequence[torch.Tensor], Sequence[float]],
    reason: str,
) -> Path | None:
    """Write the script, over one for the same segment; return its path, or None on failure.

    A generic kernel was made from `examples`. Without any the kernel is the segment's own.
    """
    own = "segment"
    if examples:
        of = "".join(f"structure_of({_code(one)}), " for one in examples)
        own = f"generic_of([{of}structure_of(segment)], segment)"
    script = _SCRIPT.format(
        backend=backend,
        torch=torch.__version__,
        # it stands inside a docstring of the script
        reason=reason.replace("\\", "/").replace('"', "'"),
        segment=_code(segment),
        source=own,
    )
    path = directory / f"{segment.digest[:12]}.py"
    tensors, scalars = inputs
    try:
        directory.mkdir(mode=0o700, parents=True, exist_ok=True)
        torch.save({"tensors": list(tensors), "scalars": list(scalars)}, path.with_suffix(".pt"))
        path.write_text(script)
    except (OSError, RuntimeError):  # torch.save raises the second on a full disk
        return None
    return path


def _code(value: Any) -> str:
    """Python source of an expression for `value`, in the names that the script imports."""
    match value:
        case Segment():
            calls = "".join(f"\n        {_code(call)}," for call in value.calls)
            scalars = "".join(f"{kind.__name__}, " for kind in value.scalars)
            return (
                f"Segment(\n    {_code(value.inputs)},\n    ({scalars}),\n    ({calls}\n    ),\n"
                f"    {value.outputs!r},\n    {value.default_dtype!r},\n)"
            )
        case Call():
            return (
                f"Call(op_named({str(value.op)!r}), {_code(value.args)}, {_code(value.kwargs)}, "
                f"{_code(value.outputs)})"
            )
        case TensorSpec():
            return (
                f"TensorSpec({value.size!r}, {value.stride!r}, {value.dtype!r}, {value.device!r})"
            )
        case Ref() | ScalarRef():
            return f"{type(value).__name__}({value.index})"
        # with a comma behind each item, so that a tuple of one stays a tuple
        case tuple():
            return f"({''.join(f'{_code(item)}, ' for item in value)})"
    return repr(value)
