"""Decomposes composite ops as eager does, where torch does otherwise for subclasses and in modes.

There torch's own way rounds otherwise, takes longer, reads values, or needs memory that a lazy
tensor doesn't have. In: the classes whose ops are recorded. Out: kernels above autograd for the ops
in `ROUTES`, which run eager's ops for these classes. `op_handlers` takes the same routes for ops
that come whole in inference mode, and `native/routes.h` has some of them in C++.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch._ops import OpOverload

from lazy_tensor.dispatch import torch_private

aten = torch.ops.aten
NONE, MEAN = 0, 1  # at::Reduction


class Route(NamedTuple):
    """One way to run a composite op."""

    is_taken: Callable[..., bool]
    """Whether the route serves a call with these arguments."""
    run: Callable[..., Any]
    """The op by eager's parts."""


def _needs_no_gradient(tensor: torch.Tensor, *_: Any, **__: Any) -> bool:
    return not (tensor.requires_grad and torch.is_grad_enabled())


# Where nobody needs a gradient, eager asks LAPACK for eigenvalues or singular values alone. For
# subclasses and in modes torch asks for the vectors too: that takes longer, and rounds otherwise.
def _eigvalsh(tensor: torch.Tensor, uplo: str = "L") -> Any:
    return aten._linalg_eigh.default(tensor, uplo, False)[0]


def _svdvals(tensor: torch.Tensor, *, driver: str | None = None) -> Any:
    return aten._linalg_svd.default(tensor, False, False, driver=driver)[1]


def _rank(*args: Any, out: torch.Tensor, **kwargs: Any) -> torch.Tensor:
    """`matrix_rank(out=)`: for subclasses and in modes torch's own leaves `out` unwritten."""
    ranks = aten.linalg_matrix_rank(*args, **kwargs)
    # each sum is over one rank: this only writes the ranks into `out`
    return torch.sum(ranks.unsqueeze(-1), -1, out=out)


def _multiplies_one_by_one(left: torch.Tensor, right: torch.Tensor, **_: Any) -> bool:
    """Whether eager multiplies a batch by one matrix as a batched product.

    As `_matmul_impl` in torch's LinearAlgebra.cpp has it. Not if the one matrix requires a
    gradient, which would have to be summed over its copies. For subclasses and in modes torch makes
    one large product, which rounds otherwise.
    """
    if left.dim() != 3 or right.dim() != 3 or left.size(0) == right.size(0):
        return False
    one = left if left.size(0) == 1 else right
    return one.size(0) == 1 and not one.requires_grad


def _product(left: torch.Tensor, right: torch.Tensor, **out: torch.Tensor) -> Any:
    n = left.size(0) if right.size(0) == 1 else right.size(0)
    return torch.bmm(left.expand(n, -1, -1), right.expand(n, -1, -1), **out)


def _takes_mean(*args: Any, **kwargs: Any) -> bool:
    reduction: int = args[5] if len(args) > 5 else kwargs.get("reduction", MEAN)
    return reduction == MEAN


def _mean_ctc_loss(
    log_probs: torch.Tensor,
    targets: torch.Tensor,
    input_lengths: list[int],
    target_lengths: list[int],
    blank: int = 0,
    reduction: int = MEAN,
    zero_infinity: bool = False,
) -> Any:
    """`ctc_loss` with its mean by ops: torch's C++ reads memory that a lazy tensor doesn't have."""
    losses = aten.ctc_loss.IntList(
        log_probs, targets, input_lengths, target_lengths, blank, NONE, zero_infinity
    )
    lengths = torch.tensor(target_lengths, dtype=losses.dtype, device=losses.device)
    return (losses / lengths.clamp_min(1)).mean()


def _is_at_places(_: torch.Tensor, places: torch.Tensor, *__: Any, **___: Any) -> bool:
    """Whether `tensor_split` may take the tensor as the places to split at, or as a number."""
    return places.device.type == "cpu" and places.dtype == torch.int64 and places.dim() <= 1


def _split(tensor: torch.Tensor, tensor_indices_or_sections: torch.Tensor, dim: int = 0) -> Any:
    # torch's C++ reads the tensor's memory, which a lazy one doesn't have
    places = tensor_indices_or_sections.tolist()
    split = aten.tensor_split.indices if isinstance(places, list) else aten.tensor_split.sections
    return split(tensor, places, dim)


def _has_classes(classes: torch.Tensor, num_classes: int = -1) -> bool:
    """Whether `one_hot` need read no values: torch reads them of plain tensors, for checks.

    The op that `_one_hot` uses, `scatter_`, raises for a class that is out of bounds.
    """
    return num_classes > 0 and classes.dtype == torch.int64 and classes.numel() > 0


def _one_hot(classes: torch.Tensor, num_classes: int) -> torch.Tensor:
    zeros = classes.new_zeros((*classes.shape, num_classes))
    return zeros.scatter_(-1, classes.unsqueeze(-1), 1)


OF_PRODUCTS: dict[OpOverload, Route] = dict.fromkeys(
    (aten.matmul.default, aten.matmul.out), Route(_multiplies_one_by_one, _product)
)
ROUTES: dict[OpOverload, Route] = {
    aten.linalg_eigvalsh.default: Route(_needs_no_gradient, _eigvalsh),
    aten.linalg_svdvals.default: Route(_needs_no_gradient, _svdvals),
    aten.linalg_eigvals.default: Route(_needs_no_gradient, aten._linalg_eigvals.default),
    **{
        getattr(aten.linalg_matrix_rank, overload): Route(lambda *_, **__: True, _rank)
        for overload in ("atol_rtol_tensor_out", "atol_rtol_float_out", "out", "out_tol_tensor")
    },
    aten.ctc_loss.IntList: Route(_takes_mean, _mean_ctc_loss),
    aten.tensor_split.tensor_indices_or_sections: Route(_is_at_places, _split),
    aten.one_hot.default: Route(_has_classes, _one_hot),
    **OF_PRODUCTS,
}
"""For each composite op, the route that gives eager's parts."""
IN_PYTHON = ROUTES.keys() - OF_PRODUCTS.keys()
"""Ops that C++ must leave whole in inference mode: only `op_handlers` knows their routes there.

The C++ that decomposes composite ops (`native/kernel.h`) knows the route of products.
"""

_in_cpp = {*OF_PRODUCTS, aten.one_hot.default}
"""Ops whose routes `native/routes.h` takes over."""
# Two sets of kernels, so that `leave_to_cpp` can remove the first one alone.
_until_then = torch_private.KernelsAboveAutograd()
_others = torch_private.KernelsAboveAutograd()


def install(tensor_class: type[Any], mode_class: type[Any]) -> None:
    """Route calls on tensors of `tensor_class`, and on plain ones in modes of `mode_class`."""
    ours = (torch.Tensor, torch.nn.Parameter, tensor_class)

    def is_ours(op: OpOverload, *args: Any, **kwargs: Any) -> bool:
        tensors = [arg for arg in (*args, *kwargs.values()) if isinstance(arg, torch.Tensor)]
        # Autocast makes the call again, with the tensors cast: only then is the route taken.
        is_cast = op is not aten.matmul.out and torch.is_autocast_enabled(tensors[0].device.type)
        return (
            all(type(tensor) in ours for tensor in tensors)
            and not is_cast
            and torch_private.only_mode_is(mode_class)
            and ROUTES[op].is_taken(*args, **kwargs)
        )

    for op, route in ROUTES.items():
        kernels = _until_then if op in _in_cpp else _others
        kernels.put(op, is_ours, route.run)


def leave_to_cpp() -> None:
    """Remove the routes that C++ has from now on."""
    _until_then.remove()
