"""What a callable is given: expressions over a few operands.

`f` is the callable; `x` and `y` are square matrices, `v` a vector, `g` a batch of images, `c` a
complex matrix, `i` a vector of indices, `n` the number 2 in a tensor, `b` a mask, `s` and `t` the
storage of `x`, untyped and typed.
"""

from __future__ import annotations

import io
import re
from typing import Any

import torch


class Twice(torch.nn.Module):
    def __init__(self, w: torch.Tensor) -> None:
        super().__init__()
        self.w = torch.nn.Parameter(w) if w.is_floating_point() else w

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * 2 + self.w


def twice(x: torch.Tensor) -> torch.Tensor:
    return x * 2


def saved(save: Any, value: Any) -> Any:
    return torch.load(_file(save, value), weights_only=False)


def saved_script(save: Any, script: Any, x: torch.Tensor) -> Any:
    return torch.jit.load(_file(save, script))(x)


def _file(save: Any, value: Any) -> io.BytesIO:
    file = io.BytesIO()
    save(value, file)
    file.seek(0)
    return file


def through(queue: Any, value: Any) -> Any:
    queue.put(value)
    return queue.get()


def piped(first: Any, second: Any, value: Any) -> Any:
    first.send(value)
    return second.recv()


NAMES = {
    "torch": torch, "io": io, "Twice": Twice, "twice": twice, "saved": saved,
    "saved_script": saved_script, "through": through, "piped": piped,
}  # fmt: skip
"""What expressions name besides `f` and the operands."""

GENERAL = (
    "f(x)", "f(x, y)", "f(x, 1)", "f(x, 0)", "f(x, y, x)", "f(x, 0, 1)", "f(x, 1, 2)",
    "f([x, y])", "f([x, y], [y, x])", "f([x, y], 1)", "f([x, y], 1, 2)",
    "f([x, y], [x, y], [y, x])",
    "f(x, [0])", "f(x, [1, 0])", "f(x, (9,))", "f(x, [1, 2], 0)", "f(x, -1, 3, 3)",
    "f(x, i)", "f(x, 0, i)", "f(x, 0, i, y)", "f(x, 0, i, 1)", "f(x, [i], v)", "f(x, (i, i), v)",
    "f(x, i, x)", "f(x, b)", "f(x, b, y)", "f(x, b, 1)", "f(x, b, v)", "f(b, x, y)", "f(b)",
    "f(x, n)", "f(x, n, n)", "f(x, 0, n)", "f(x, 0, n, 1)", "f(x, [n, n])", "f(x, 0, 0, n)",
    "f(n)", "f(n, n)", "f((n, n))", "f((n, n), 1)", "f((n, n), n)", "f(0, n)", "f(n, 1)",
    "f(v)", "f(v, v)", "f(v, i)", "f(v, 2)", "f(x, v)", "f(x, v, v)", "f(v, x)", "f(v, x, x)",
    "f(v, n)", "f(i)", "f(i, i)", "f(i, x)", "f(i, 3)", "f(i, v)", "f(i, n)", "f(i, v, 4)",
    "f(1, x)", "f(x, 0.5)", "f(x, 0.5, 2.0)", "f(x, y, 0.5)", "f('ij,jk', x, y)", "f('ij->ji', x)",
    "f(x, torch.float64)", "f(x, torch.int64)", "f(x, 'cpu')", "f(x, None)", "f(x, True)",
    "f(x, dtype=torch.float64)", "f(x, dim=0)", "f(x, out=y)", "f(x, x, out=y)", "f(x, 0, out=y)",
    "f(x, lambda a: a)", "f(x, lambda a: a + 1)", "f(x, y, lambda a, b: a + b)",
    "f(x, y, lambda a: a)", "f(lambda a: a * 2, x)", "f(lambda a: (a * 2).sum(), x)",
    "f(lambda a: a * 2)(x)", "f(lambda a: (a * 2).sum())(x)", "f(lambda a: a * 2, (x,))",
    "f(lambda a: a * 2, (x,), (y,))", "f(lambda a: (a * 2).sum(), x, y)", "f(twice, x)",
    "f(twice, (x,))", "f(twice)(x)", "f(lambda a: a * 2, x, use_reentrant=False)",
    "f(g)", "f(g, 2)", "f(g, (2, 2))", "f(g, g)", "f(g, [1, 1])", "f(g, [1, 1, 1, 1])",
    "f(g, x[0])", "f(g, v, v)", "f(g, v)", "f(g, None, None, v, v)", "f(g, None, None, v, v, True)",
    "f(g, g, g)", "f(g, g[:, :, :2, :2])", "f(g, torch.ones(3, 3, 2, 2))", "f(g, 0.5)",
    "f(g, 2, 2, return_indices=True)", "f(g, scale_factor=2)", "f(g[0])", "f(g[0], g[1])",
    "f(g[0], g[0].mT, g[0])", "f(g, g.flatten()[:6].view(2, 3))", "f(g, 2, 1)",
    "f(x, x, x, 1)", "f(x, y, v)", "f(x, x, i)", "f(x, y, i)", "f(x, i, i)", "f(i, x, i)",
    "f(i, x, n)", "f(i, x, i[:2])", "f(v, v, v)", "f(i, i, v)", "f(v, i, v)", "f(v, 0, i, v)",
    "f(c)", "f(c, c)", "f(c, 1)", "f(x.tolist())", "f(x, {'a': y})", "f({'a': x, 'b': [y]})",
    "f(x, [y], [x])", "f(x, 'i')", "f(x, ...)", "f(x, (0, 1))", "f(x, (i, 1))", "f(x, (b,), 5.0)",
    "f(x, (0, ...), 5.0)", "f(x, slice(0, n))", "f(x, slice(0, n), y[:2])", "f(x, n, y[0])",
    "f(x, 1, y[1])", "f(x, (n, n), 5.0)", "f(x, i, 5.0)", "f(x, io.BytesIO())", "f(3, x)",
    "f((x,))", "f((x, y), 3)", "f(x, [1, 2])", "f(x, x, x, x)", "f([x], 1.0)", "f([x], 1.0, 2.0)",
)  # fmt: skip

OF_STORAGES = (
    "f(s)", "f(s, 0)", "f(s, 0, 1)", "f(s, s)", "f(s, 8)", "f(s, slice(0, 4))", "f(s, s, True)",
    "f(s, slice(0, 4), 7)", "f(s, torch.float64)", "f(s, 'cpu')", "f(s, {})", "f(s, 2)",
    "f(t)", "f(t, 0)", "f(t, 0, 1)", "f(t, t)", "f(t, 2)", "f(t, slice(0, 2))", "f(t, {})",
    "f(t, 'torch.DoubleStorage')", "f(x, s)", "f(x, s, 0, (2,), (1,))", "f(x, t, 0, (2,), (1,))",
    "f(y, s, 0, (2,), (1,))", "f(n, s)", "f(s, x)",
)  # fmt: skip

OF_ONE: dict[str, tuple[str, ...]] = {
    "multiprocessing.SimpleQueue": ("through(f(), x)", "through(f(), [x, i])"),
    "multiprocessing.Queue": ("through(f(), x)", "through(f(), [x, i])"),
    "multiprocessing.Pipe": ("piped(*f(), x)",),
    "utils.swap_tensors": ("f(x, y)",),
    "torch.save": ("saved(f, x)", "saved(f, [x, x[0], i])", "saved(f, s)", "saved(f, c.conj())"),
    "Tensor.stft": ("f(v.repeat(8), 8, return_complex=True)",
                    "f(v.repeat(8), 8, window=y.flatten()[:8], return_complex=True)"),
    "torch.stft": ("f(v.repeat(8), 8, return_complex=True)",
                   "f(v.repeat(8), 8, window=y.flatten()[:8], return_complex=True)"),
    "torch.tensor": ("f([n, 2])", "f([x[0, 0], 2])", "f([[n, n], [n, n]], dtype=torch.float64)"),
    "torch.asarray": ("f(x, copy=True)", "f([n, n])"),
    "torch.as_tensor": ("f([n, 2])",),
    "torch.Tensor": ("f([n, x[0, 0]])",),
    "torch.LongTensor": ("f([n, n])",),
    "Tensor.new_tensor": ("f(x, [y[0, 0], n])",),
    "torch.frombuffer": ("f(x.numpy(), dtype=torch.int32)",),
    "torch.from_numpy": ("f(x.numpy())", "f(i.numpy())"),
    "torch.from_dlpack": ("f(x)", "f(i)", "f(x.numpy())"),
    "utils.dlpack.from_dlpack": ("f(x)", "f(torch.utils.dlpack.to_dlpack(x))"),
    "torch.sparse_coo_tensor": (
        "f(torch.stack([i, i]), v)", "f(torch.stack([i, i]), v, (n + 1, 3))",
        "f(torch.stack([i, i]), v, (3, 3)).to_dense()",
    ),
    "torch.sparse_csc_tensor": ("f([0, 1, 2, 3], i, v)",),
    "torch.sparse_csr_tensor": ("f([0, 1, 2, 3], i, v)",),
    "torch.sparse_compressed_tensor": ("f([0, 1, 2, 3], i, v, layout=torch.sparse_csr)",),
    "jit.trace": ("f(twice, x)(y)", "f(twice, (x,))(y)"),
    "jit.script": ("f(twice)(x)", "f(Twice(x))(y)"),
    "jit.trace_module": ("f(Twice(x), {'forward': (y,)})(x)",),
    "jit.freeze": ("f(torch.jit.script(Twice(x).eval()))(y)",),
    "jit.optimize_for_inference": ("f(torch.jit.script(Twice(x).eval()))(y)",),
    "jit.save": ("saved_script(f, torch.jit.script(Twice(x)), y)",),
    "jit.fork": (
        "torch.jit.wait(f(twice, x))", "torch.jit.wait(f(torch.jit.script(twice), x))",
    ),
    "func.functional_call": ("f(Twice(y), {'w': x}, (y,))",),
    "nn.utils.stateless.functional_call": ("f(Twice(y), {'w': x}, (y,))",),
    "func.stack_module_state": ("f([Twice(x), Twice(y)])",),
    "utils.data.DataLoader": (
        "list(f(torch.utils.data.TensorDataset(x, i), batch_size=2))", "list(f(x, batch_size=2))",
        "list(f(x, batch_size=2, sampler=i))",
    ),
    "utils.data.TensorDataset": ("f(x, i)[1]", "f(x, i)[n]", "f(x, i)[i]"),
    "utils.data.Subset": ("list(f(x, i))", "list(f(x, [0, 1]))"),
    "utils.data.WeightedRandomSampler": ("list(f(v, 4))", "list(f(v, n))"),
    "utils.data.SubsetRandomSampler": ("list(f(i))",),
    "utils.data.RandomSampler": ("list(f(x))", "list(f(x, num_samples=n))"),
    "utils.data.random_split": ("[list(part) for part in f(x, [1, 2])]",),
    "nn.utils.rnn.pack_padded_sequence": (
        "f(x, i + 1, batch_first=True, enforce_sorted=False)",
        "f(g[0], i.sort(descending=True)[0] + 1, batch_first=True)",
    ),
    "nn.utils.rnn.pad_packed_sequence": (
        "f(torch.nn.utils.rnn.pack_sequence([v, v[:2]], enforce_sorted=False))",
    ),
    "nn.utils.rnn.unpad_sequence": ("f(x, i + 1)", "f(x, i + 1, batch_first=True)"),
    "torch.embedding_bag": ("f(x, i, i.sort()[0])",),
    "functional.embedding_bag": ("f(i, x, i.sort()[0])", "f(torch.stack([i, i]), x)"),
    "functional.ctc_loss": (
        "f(g[0].log_softmax(-1), i[:2].expand(4, 2) * 0 + 1, i[[0, 0, 0, 0]] + 3, "
        "i[[0, 0, 0, 0]] + 1)",
    ),
    "functional.grid_sample": ("f(g, g[..., :2])",),
    "functional.affine_grid": (
        "f(g[:, 0, :2, :3], (2, 3, 4, 4))", "f(g[:, 0, :2, :3], (n, 3, 4, 4))",
    ),
    "functional.max_unpool2d": (
        "f(*torch.nn.functional.max_pool2d(g, 2, return_indices=True), 2)",
    ),
    "functional.multi_head_attention_forward": (
        "f(g[0][:, :, :3], g[0][:, :, :3], g[0][:, :, :3], 3, 1, torch.cat([x, y, x]), "
        "torch.cat([v, v, v]), None, None, False, 0.0, x, v)",
    ),
    "autograd.backward": ("f((x * 2).requires_grad_().sum())",),
    "autograd.grad": ("f((x * 2).sum(), x)", "f((x * 2).sum(), [x, y], allow_unused=True)"),
    "Tensor.backward": ("f((x * 2).requires_grad_().sum())",),
}  # fmt: skip
"""What only one callable can be given, before all others."""

VALUES_UNKNOWN = re.compile(r".*\.(empty\w*|new_empty\w*|new|resize\w*|Tensor|\w+Tensor|\w+Storage|"
                            r"data_ptr|const_data_ptr|__reduce_ex__|lstsq)")  # fmt: skip
"""Callables that leave memory as it was, or whose last bits hang on where memory lies (LAPACK's
least squares): values are compared in patterns of their own only."""


def are_values_known(name: str, pattern: str) -> bool:
    """Whether a program gives the same values each time."""
    return pattern in OF_ONE.get(name, ()) or not VALUES_UNKNOWN.fullmatch(name)


_OWN_ONLY = re.compile(r"torch\.(_?sparse_\w+_tensor)|\w+\.embedding_bag|jit\.script")
"""Callables that get their own patterns only: they take wrong indices and die later, or leave
memory as it was; or raise for tensors as their caches have it."""


def patterns_of(name: str) -> tuple[str, ...]:
    """What `name` is tried with, in this order."""
    if name.startswith(("UntypedStorage", "TypedStorage")):
        return OF_STORAGES
    own = OF_ONE.get(name, ())
    if _OWN_ONLY.fullmatch(name):
        return own
    return (*own, *GENERAL, *OF_STORAGES)


def operands_of(pattern: str) -> list[str]:
    """The operands that a pattern names, in the order of their first use."""
    found = re.findall(r"(?<![\w.'])([xyvgcinbst])(?![\w(='])", pattern)
    return list(dict.fromkeys(found))
