"""Handles calls that need more than recording: random draws, aliases, masks, composite ops.

In: a call whose rule isn't `RECORD`. Out: `(True, result)`, or `(False, None)` to record the call
as it is. `recorder` looks the handler up in `HANDLERS`, by the op's rule.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import torch

from lazy_tensor.dispatch import torch_private
from lazy_tensor.dispatch.metadata.infer import is_marked, is_recordable, meta_of
from lazy_tensor.dispatch.ops.composite_overrides import ROUTES
from lazy_tensor.dispatch.ops.request import Request, record_again
from lazy_tensor.dispatch.ops.rnn_layer import INFERENCE, TRAINING
from lazy_tensor.dispatch.ops.rules import DRAWS, VIEWS_IN_PLACE, Rule, rule_from_schema, why_eager
from lazy_tensor.dispatch.record import eager_fallback
from lazy_tensor.dispatch.record.extend_trie import wrapper_arguments
from lazy_tensor.dispatch.record.inputs import admit, is_plain, slot_of, value_of
from lazy_tensor.dispatch.record.samples import SAMPLED, can_be_recorded
from lazy_tensor.dispatch.run.tape import Draw, drawn
from lazy_tensor.dispatch.trie import tensor_types
from lazy_tensor.dispatch.trie.trace import ALIAS, State, Trace

Handled = tuple[bool, Any]
RECORD_IT: Handled = (False, None)
aten = torch.ops.aten
DTYPE_OF_NUMBER = {
    bool: torch.bool, int: torch.int64, float: torch.float64, complex: torch.complex128,
}  # fmt: skip
"""The dtype of the tensor that the dispatcher makes of a Python number in a tensor's place."""


def _now(trace: Trace, request: Request, reason: str | None = None) -> Handled:
    return True, eager_fallback.run(trace, request, reason or why_eager(request.op), by_rule=True)


def _same(trace: Trace, request: Request) -> Handled:
    return True, request.args[0]


def _decompose(trace: Trace, request: Request) -> Handled:
    """Composite ops, which come here whole under `torch.inference_mode()`: record their parts."""
    # An op with a kernel for the device is an op like others: autograd doesn't decompose it either.
    if any(torch_private.has_own_kernel(request.op, t.device) for t in request.tensors):
        return HANDLERS[rule_from_schema(request.facts)](trace, request)
    if request.facts.is_out:
        return _now(trace, request)
    if not all(is_recordable(t) for t in request.tensors):
        return _now(trace, request, "an argument is a tensor that traces don't hold")
    # The parts come here as calls of their own. C++ takes none of them while the trace is busy.
    trace.busy = False
    with request.owner if request.in_mode else nullcontext():
        route = ROUTES.get(request.op)
        if route is not None and route.is_taken(*request.args, **request.kwargs):
            result = route.run(*request.args, **request.kwargs)
        else:
            result = torch_private.decompose(request.op, request.args, request.kwargs)
    if result is NotImplemented:
        return _now(trace, request, "torch doesn't say which ops it is made of")
    return True, result


def _alias(trace: Trace, request: Request) -> Handled:
    """`detach`, `alias`: another tensor on the same value. A computed one enters no trace."""
    tensor = request.args[0]
    if is_marked(tensor):
        return RECORD_IT
    if not is_plain(tensor) and type(tensor) is tensor_types.tensor_class:
        meta = wrapper_arguments(meta_of(tensor))
        if tensor._value.slot is not None:
            _link_alias(trace, request)
        return True, tensor_types.new_tensor(tensor._value, meta, tensor)
    reason = admit(trace, request) if request.in_mode else "a plain tensor outside lazy_mode"
    if reason is not None:
        return True, eager_fallback.run(trace, request, reason)
    _link_alias(trace, request)
    meta = wrapper_arguments(meta_of(tensor))
    return True, tensor_types.new_tensor(value_of(trace, tensor), meta, tensor)


def _link_alias(trace: Trace, request: Request) -> None:
    """Make the same alias a hit when it comes at this place again."""
    slot = slot_of(trace, request.args[0])
    key = (request.op._op, slot)
    if slot is None or key in trace.state:
        return
    state = State(trace.state, key, None)
    state.kind, state.meta = ALIAS, None
    trace.state[key] = state


def _zeros(trace: Trace, request: Request) -> Handled:
    """`_efficientzerotensor`, which has no memory: record zeros that have."""
    return True, record_again(request, aten.zeros.default, *request.args, **request.kwargs)


def _draw(trace: Trace, request: Request) -> Handled:
    """Random ops that need only a shape: draw now, so that draws stay in program order."""
    return True, tensor_types.concrete(drawn(trace, Draw(request, like=request.args[0])))


def _draw_into(trace: Trace, request: Request) -> Handled:
    """In-place random ops: draw now, into new memory, and record a copy into the target.

    A target that isn't pending is written at once.
    """
    target = request.args[0]
    if trace.tape is None and not eager_fallback.sees_pending(trace, [target]):
        return _now(trace, request, DRAWS)
    numbers = drawn(trace, Draw(request, like=target))
    return True, record_again(request, aten.copy_.default, target, tensor_types.concrete(numbers))


def _dropout(trace: Trace, request: Request) -> Handled:
    """`native_dropout`: draw the mask now and record `x * mask * (1 / (1 - p))`, as in its
    kernels."""
    tensor, p = request.args[0], request.args[1]
    trains = request.argument("train")
    if trains is False or tensor.numel() == 0 or not is_recordable(tensor):
        return RECORD_IT
    # The op is run on zeros of the tensor's layout: only its mask is of use.
    mask = drawn(trace, Draw(request, like=tensor, zeroed=True, item=1))
    lazy_mask = tensor_types.concrete(mask)
    masked = record_again(request, aten.mul.Tensor, tensor, lazy_mask)
    scale = 0.0 if p == 1 else 1.0 / (1.0 - p)
    return True, (record_again(request, aten.mul_.Tensor, masked, scale), lazy_mask)


def _sample(trace: Trace, request: Request) -> Handled:
    """Random ops with tensors as parameters: run their decomposition in `samples`."""
    if not (all(map(is_recordable, request.tensors)) and can_be_recorded(request.tensors)):
        return _now(trace, request, DRAWS)
    trace.busy = False  # as in `_decompose`
    with request.owner if request.in_mode else nullcontext():
        sample = SAMPLED[request.op](*request.args, **request.kwargs)
    return _now(trace, request, DRAWS) if sample is NotImplemented else (True, sample)


def _index(trace: Trace, request: Request) -> Handled:
    """Indexing: the size of the result depends on values if an index is a mask."""
    has_mask = any(t.dtype in (torch.bool, torch.uint8) for t in request.tensors[1:])
    reason = "an index is a mask, whose values say how many elements there are"
    return _now(trace, request, reason) if has_mask else RECORD_IT


def _wait(trace: Trace, request: Request) -> Handled:
    """`_wrap_tensor_autograd`: torch wraps a collective's result so that its first use waits.

    Record `wait_tensor` instead. It is a view, so a plan waits where the result is first needed.
    """
    wait = torch.ops._c10d_functional.wait_tensor.default
    return True, record_again(request, wait, request.args[0])


def _if_no_dropout(trace: Trace, request: Request) -> Handled:
    """Fused attention, which draws random numbers in its kernel if it drops out."""
    drops_out = request.argument("dropout_p", 0.0)
    return _now(trace, request, DRAWS) if drops_out else RECORD_IT


def _rnn(trace: Trace, request: Request) -> Handled:
    """oneDNN's recurrent layer: record the op that runs as in the grad mode that is on now."""
    op = TRAINING if torch.is_grad_enabled() else INFERENCE
    return True, record_again(request, op, *request.args, **request.kwargs)


def _view_in_place(trace: Trace, request: Request) -> Handled:
    """`transpose_` and its like, on a pending tensor: record the view, which the tensor becomes.

    Aliases keep their shape: only this tensor gets the view's value.
    """
    tensor, *others = request.args
    is_own = type(tensor) is tensor_types.tensor_class and not is_marked(tensor)
    if not is_own or tensor._value.slot is None or tensor._value.data is not None:
        return _now(trace, request)
    view = record_again(request, VIEWS_IN_PLACE[request.op], tensor, *others, **request.kwargs)
    tensor_types.become(tensor, view)
    tensor._value = view._value
    return True, tensor


def view_of_number(request: Request) -> Any:
    """Record a view of a Python number as the same view of a 0-dim tensor.

    Autograd's formulas contain such views: the gradient of `z * (1 + 2j)` conjugates the number.
    """
    number, *others = request.args
    dtype = DTYPE_OF_NUMBER[type(number)]
    tensor = record_again(request, aten.scalar_tensor.default, number, dtype=dtype)
    return record_again(request, request.op, tensor, *others, **request.kwargs)


HANDLERS: dict[Rule, Callable[[Trace, Request], Handled]] = {
    Rule.RECORD: lambda trace, request: RECORD_IT,
    Rule.EAGER: _now,
    Rule.SAME: _same,
    Rule.DECOMPOSE: _decompose,
    Rule.ALIAS: _alias,
    Rule.ZEROS: _zeros,
    Rule.DRAW: _draw,
    Rule.DRAW_INTO: _draw_into,
    Rule.DROPOUT: _dropout,
    Rule.SAMPLE: _sample,
    Rule.INDEX: _index,
    Rule.WAIT: _wait,
    Rule.IF_NO_DROPOUT: _if_no_dropout,
    Rule.RNN: _rnn,
    Rule.VIEW_IN_PLACE: _view_in_place,
}
