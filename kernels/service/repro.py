"""Writes a script that reproduces a wrong result of a kernel without the user's program.

In: a segment, the backend's name, and the inputs on which kernel and op-by-op execution differ.
Out: `<digest>.py`, and beside it `<digest>.pickle` with the segment and `<digest>.pt` with the
inputs. Called by `service.compile`. The script calls `kernel_of`.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import torch

from lazy_tensor.kernels.backend import Backend, BuildsSoon, Kernel
from lazy_tensor.kernels.backends.artifact import for_own_sizes
from lazy_tensor.kernels.segment import Segment
from lazy_tensor.kernels.service.workers import pickled

_SCRIPT = '''\
"""A kernel of the backend {backend!r} and op-by-op execution differ: run this to see it.

Found with torch {torch}: {reason}
The ops (print `segment.text()` to read them) and the inputs lie beside this file. Ends with status
1 if they differ here too.
"""

import pickle
import sys
from pathlib import Path

import torch

from lazy_tensor.kernels.backends.aten import compile_aten
from lazy_tensor.kernels.backend import backend_of
from lazy_tensor.kernels.service.repro import kernel_of
from lazy_tensor.kernels.service.verify import difference_of

segment, source = pickle.loads(Path(__file__).with_suffix(".pickle").read_bytes())
inputs = torch.load(Path(__file__).with_suffix(".pt"), weights_only=True)
kernel = kernel_of(backend_of({backend!r}), source)
reason = difference_of(kernel, compile_aten(segment), segment, inputs["tensors"], inputs["scalars"])
print(reason or "they agree")
sys.exit(reason is not None)
'''


def kernel_of(backend: Backend, source: Segment) -> Kernel:
    """The kernel that the compile service would build, for the sizes of `source`."""
    if isinstance(backend, BuildsSoon) and backend.can_build(source):
        artifact = backend.build_soon(source)
        if artifact is not None:
            return for_own_sizes(backend.load(source, artifact), source)
    return backend.compile(source)


def write_script(
    directory: Path,
    backend: str,
    segment: Segment,
    source: Segment,
    inputs: tuple[Sequence[torch.Tensor], Sequence[float]],
    reason: str,
) -> Path | None:
    """Write the script, over one for the same segment; return its path, or None on failure.

    The kernel was built from `source`: the segment itself, or a generic one for its sizes.
    """
    script = _SCRIPT.format(
        backend=backend,
        torch=torch.__version__,
        # it stands inside a docstring of the script
        reason=reason.replace("\\", "/").replace('"', "'"),
    )
    path = directory / f"{segment.digest[:12]}.py"
    tensors, scalars = inputs
    try:
        directory.mkdir(mode=0o700, parents=True, exist_ok=True)
        torch.save({"tensors": list(tensors), "scalars": list(scalars)}, path.with_suffix(".pt"))
        path.with_suffix(".pickle").write_bytes(pickled((segment, source)))
        path.write_text(script)
    except (OSError, RuntimeError):  # torch.save raises the second on a full disk
        return None
    return path
