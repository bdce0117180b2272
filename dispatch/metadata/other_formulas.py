"""Output metadata in closed form of common ops that are neither elementwise nor views.

In: an op's arguments by name and its tensors' metadata; the first is floating, none is empty. Out:
the metadata of its output, or a list of several. None where only torch can tell, or where eager may
raise: the forms check what the ops check. Called by `shape_formulas`.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch._ops import OpOverload

from lazy_tensor.dispatch.metadata.infer import Meta, dense_stride, is_dense

aten = torch.ops.aten
Args = dict[str, Any]
"""The arguments by their names in the schema."""
Form = Callable[[Args, list[Meta]], Meta | list[Meta | None] | None]
FLOATS = (torch.float32, torch.float64)


def dense(shape: tuple[int, ...], like: Meta) -> Meta:
    """A new contiguous tensor of `like`'s dtype and device."""
    return (tuple(shape), dense_stride(shape), 0, *like[3:])


def broadcast(sizes: list[tuple[int, ...]]) -> tuple[int, ...] | None:
    """The shape that these sizes broadcast to; None if they don't."""
    ndim = max(len(size) for size in sizes)
    padded = [(1,) * (ndim - len(size)) + tuple(size) for size in sizes]
    result: list[int] = []
    for column in zip(*padded, strict=True):
        wide = {n for n in column if n != 1}
        if len(wide) > 1:
            return None
        result.append(wide.pop() if wide else 1)
    return tuple(result)


def _matmul(args: Args, metas: list[Meta], n_dims: int = 2) -> Meta | None:
    """`mm`, `bmm`, and the product in `addmm`, whose operands come last."""
    left, right = metas[-2:]
    if not len(left[0]) == len(right[0]) == n_dims:
        return None
    (*batch, n, k), (*its_batch, its_k, p) = left[0], right[0]
    if batch != its_batch or k != its_k or left[3:] != right[3:]:
        return None
    return dense((*batch, n, p), left)


def _addmm(args: Args, metas: list[Meta]) -> Meta | None:
    if len(metas) != 3 or metas[0][3:] != metas[1][3:]:
        return None
    result = _matmul(args, metas)
    fits = result is not None and broadcast([metas[0][0], result[0]]) == result[0]
    return result if fits else None


def _embedding(args: Args, metas: list[Meta]) -> Meta | None:
    weight, indices = metas
    if len(weight[0]) != 2 or weight[4] != indices[4] or indices[3] is not torch.int64:
        return None
    return dense((*indices[0], weight[0][1]), weight) if _are_dense(metas) else None


def _are_dense(metas: list[Meta]) -> bool:
    return all(tuple(stride) == dense_stride(size) for size, stride, *_ in metas)


def _are_alike(metas: list[Meta]) -> bool:
    return all(meta[3:] == metas[0][3:] for meta in metas)


def _whole_norm(args: Args, metas: list[Meta]) -> Meta | None:
    return dense((), metas[0]) if set(args) <= {"self", "ord"} else None


def _softmax(args: Args, metas: list[Meta]) -> Meta | None:
    size, dtype = metas[0][0], metas[0][3]
    takes = all(meta == metas[0] for meta in metas) and -len(size) <= args["dim"] < len(size)
    # softmax can also convert: with `half_to_float` the result has another dtype
    to_other_dtype = args.get("half_to_float") or args.get("input_dtype", dtype) is not dtype
    return dense(size, metas[0]) if takes and not to_other_dtype else None


def _reduced_loss(args: Args, metas: list[Meta]) -> list[Meta | None] | None:
    """`nll_loss_forward` with a reduction: the loss and the total weight, both 0-dim."""
    if args["reduction"] == 0 or len(metas) != 2 or not _is_loss_of(*metas):
        return None
    return [dense((), metas[0]), dense((), metas[0])]


def _loss_backward(args: Args, metas: list[Meta]) -> Meta | None:
    if args["reduction"] == 0 or len(metas) != 4 or not _is_loss_of(*metas[1:3]):
        return None
    return dense(metas[1][0], metas[1])


def _is_loss_of(scores: Meta, targets: Meta) -> bool:
    return (
        len(scores[0]) == 2
        and _are_dense([scores, targets])
        and tuple(targets[0]) == tuple(scores[0][:1])
        and targets[3] is torch.int64
        and targets[4] == scores[4]
    )


def _reduced(args: Args, metas: list[Meta]) -> Meta | None:
    """`sum` and `mean`. No dims, or an empty list of them, means all."""
    size, dims = metas[0][0], args.get("dim")
    if args.get("dtype") is not None or metas[0][3] not in FLOATS or len(metas) != 1:
        return None
    if not dims:
        dims = range(len(size))
    if not all(type(d) is int and -len(size) <= d < len(size) for d in dims):
        return None
    gone = {d % len(size) for d in dims}
    if len(gone) != len(dims):
        return None  # one dim twice, which raises
    if args.get("keepdim"):
        return dense(tuple(1 if d in gone else n for d, n in enumerate(size)), metas[0])
    return dense(tuple(n for d, n in enumerate(size) if d not in gone), metas[0])


def _clone(args: Args, metas: list[Meta]) -> Meta | None:
    size, stride = metas[0][:2]
    layout = args.get("memory_format")
    if layout is torch.contiguous_format:
        return dense(size, metas[0])
    if layout in (None, torch.preserve_format) and is_dense(size, stride):
        return (tuple(size), tuple(stride), 0, *metas[0][3:])
    return None


def _layer_norm(args: Args, metas: list[Meta]) -> list[Meta | None] | None:
    size, shape = metas[0][0], tuple(args["normalized_shape"])
    n_outer = len(size) - len(shape)
    # Under autocast the input has 16 bits and the parameters 32. On the CPU the statistics then
    # have the parameters' dtype, which torch's meta function doesn't know.
    is_mixed = (
        metas[0][3] in (torch.bfloat16, torch.float16)
        and metas[0][4].type == "cpu"
        and len(metas) == 3
        and {meta[3] for meta in metas[1:]} == {torch.float32}
    )
    alike = [(*metas[0][:3], torch.float32, metas[0][4]), *metas[1:]] if is_mixed else metas
    # `alike` has the input as if it had the parameters' dtype, for checks and statistics
    if not _fits_norm(size, shape, metas[1:], alike):
        return None
    per_row = dense((*size[:n_outer], *(1 for _ in shape)), alike[0])
    return [dense(size, metas[0]), per_row, per_row]


def _fits_norm(
    size: tuple[int, ...], shape: tuple[int, ...], of_shape: list[Meta], metas: list[Meta]
) -> bool:
    """Whether an input of `size` can be normalized over `shape`, which `of_shape` must have."""
    return (
        bool(shape)
        and tuple(size[len(size) - len(shape) :]) == shape
        and all(tuple(meta[0]) == shape for meta in of_shape)
        and _are_alike(metas)
        and metas[0][3] in FLOATS
    )


def _layer_norm_backward(args: Args, metas: list[Meta]) -> list[Meta | None] | None:
    gradient, inputs, mean, rstd, *parameters = metas
    size, shape = inputs[0], tuple(args["normalized_shape"])
    if len(parameters) != 2 or not _fits_norm(size, shape, parameters, metas):
        return None
    if gradient[0] != size or mean[0] != rstd[0] or len(mean[0]) != len(size):
        return None
    made = (dense(size, inputs), dense(shape, inputs), dense(shape, inputs))
    return [
        meta if wanted else None for meta, wanted in zip(made, args["output_mask"], strict=True)
    ]


def _placed_back(args: Args, metas: list[Meta]) -> Meta | None:
    """The gradient of a view's base: zeros except where the view lies."""
    return dense(tuple(args["input_sizes"]), metas[0])


def _attention(args: Args, metas: list[Meta]) -> list[Meta | None] | None:
    if not _is_attention(args, metas):
        return None
    size, stride = metas[0][:2]
    if not is_dense(size, stride):
        return None
    # the output is laid out as the query; the kernel keeps logsumexp with heads innermost
    batch, heads, n, _ = size
    like = (0, *metas[0][3:])
    return [(tuple(size), tuple(stride), *like), ((batch, heads, n), (n * heads, 1, heads), *like)]


def _attention_backward(args: Args, metas: list[Meta]) -> list[Meta | None] | None:
    # gradient, query, key, value, output: the gradient has the output's size
    if not _is_attention(args, metas[1:]) or metas[0][0] != metas[4][0]:
        return None
    return [_by_position(meta[0], meta) for meta in metas[1:4]]


def _is_attention(args: Args, metas: list[Meta]) -> bool:
    """Whether query, key and value, the first in `metas`, fit each other without dropout."""
    query, key, value = (meta[0] for meta in metas[:3])
    return (
        len(query) == len(key) == len(value) == 4
        and query[:2] == key[:2] == value[:2]
        and query[3] == key[3] == value[3]
        and key[2] == value[2]
        and _are_alike(metas)
        and metas[0][3] in FLOATS
        and not args.get("dropout_p")
    )


def _by_position(size: tuple[int, ...], like: Meta) -> Meta:
    """A new tensor of size (batch, heads, positions, width), in memory (batch, positions, heads,
    width), as the kernel allocates gradients."""
    _, heads, n, width = size
    stride = (n * heads * width, width, heads * width, 1)
    return (tuple(size), stride, 0, *like[3:])


OTHERS: dict[OpOverload, Form] = {
    aten.mm.default: _matmul,
    aten.bmm.default: partial(_matmul, n_dims=3),
    aten.addmm.default: _addmm,
    aten.embedding.default: _embedding,
    aten.linalg_vector_norm.default: _whole_norm,
    aten._softmax.default: _softmax,
    aten._log_softmax.default: _softmax,
    aten._softmax_backward_data.default: _softmax,
    aten._log_softmax_backward_data.default: _softmax,
    aten.nll_loss_forward.default: _reduced_loss,
    aten.nll_loss_backward.default: _loss_backward,
    aten.sum.default: _reduced,
    aten.sum.dim_IntList: _reduced,
    aten.mean.default: _reduced,
    aten.mean.dim: _reduced,
    aten.clone.default: _clone,
    aten.native_layer_norm.default: _layer_norm,
    aten.native_layer_norm_backward.default: _layer_norm_backward,
    aten.select_backward.default: _placed_back,
    aten.slice_backward.default: _placed_back,
    aten._scaled_dot_product_flash_attention_for_cpu.default: _attention,
    aten._scaled_dot_product_flash_attention_for_cpu_backward.default: _attention_backward,
}
