"""Executes a call on sharded tensors on this rank: redistribute arguments, run the local op, wrap.

In: an op and its arguments, with sharded tensors among them. Out: sharded results. `calls` calls
`run` for a call that no state of the trie knows. The local op and the collectives are called on
local lazy tensors, so that they are recorded like other ops. `calls` then links what they recorded
to the sharded call.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch.distributed.tensor import Shard

from lazy_tensor.dispatch import settings, torch_private as dispatch_private
from lazy_tensor.dispatch.ops.request import Request
from lazy_tensor.dispatch.ops.schema import facts_of
from lazy_tensor.dispatch.record.extend_trie import numbered, outcome_of_call
from lazy_tensor.dispatch.run.tape import Draw, drawn
from lazy_tensor.dispatch.stats import STATS
from lazy_tensor.dispatch.trie.trace import local as here
from lazy_tensor.dispatch.user_frame import user_line
from lazy_tensor.kernels.segment import substituted
from lazy_tensor.sharding import torch_private
from lazy_tensor.sharding.layout import count_once_, everywhere, part_of, spec_with
from lazy_tensor.sharding.ops import at_once, corrections, errors
from lazy_tensor.sharding.ops.buckets import reduced_together
from lazy_tensor.sharding.ops.decisions import decide, learn_for_any_size, placements_at_any_size
from lazy_tensor.sharding.tensor import (
    PLACEMENTS,
    REDISTRIBUTE,
    DTensor,
    adopted,
    become,
    local_of,
    sharded,
)
from lazy_tensor.sharding.torch_private import (
    DeviceMesh,
    DTensorSpec,
    OutputSharding,
    TorchDTensor,
    parts_of,
)

aten = torch.ops.aten


def run(request: Request) -> Any:
    """The call's result, sharded.

    The cheap ways come first: a decision that is known for any size, special cases, torch's
    handlers. torch's sharding rules come last.
    """
    op, args, kwargs = request.op, request.args, request.kwargs
    if op is REDISTRIBUTE:
        return _moved(args[0], PLACEMENTS[args[1]])
    if _here.is_composite:
        args, kwargs = _without_plain(request)
        request = Request(request.owner, op, args, kwargs)
    if (understood := corrections.understood(op, args)) is not args:
        return run(Request(request.owner, op, understood, kwargs))
    known = placements_at_any_size(request)
    if known is not None:
        # only `_by_rule` keeps such decisions, so that this call needs none of the cases before it
        made = _at_this_size(request, known)
        if made is not NotImplemented:
            return made
    if op in SPECIAL:
        result = SPECIAL[op](op, args, kwargs)
        if result is not NotImplemented:
            return result
    handler = torch_private.handler_of(op)
    if handler is not None:
        if op in UNSURE and not UNSURE[op](args):
            return _without_rule(op, args, kwargs)
        return _ours(handler(op, args, kwargs))
    if op in LOSSES and args[3] == MEAN and any(_is_split(argument) for argument in args[:2]):
        return _mean_of_losses(op, args, kwargs)
    if op in corrections.MEAN_GRADIENTS and any(_is_split(argument) for argument in args[1:3]):
        summed = corrections.with_sum(op, args, MEAN, SUM)
        if summed is not None:
            gradient = run(Request(DTensor, op, summed, kwargs))
            return run(Request(DTensor, aten.div.Scalar, (gradient, args[1].numel()), {}))
    if errors.is_foreach(op):
        groups = _groups(args[0])
        if len(groups) > 1:
            return _group_by_group(op, args, kwargs, groups)
    return _by_rule(request)


def _by_rule(request: Request) -> Any:
    """The call's result by torch's sharding rule for the op; on gathered arguments without one."""
    op, args, kwargs = request.op, request.args, request.kwargs
    errors.check_arguments(request)
    info = torch_private.op_info(op, args, kwargs)
    try:
        sharding = decide(info, args, kwargs)
    except NotImplementedError:
        return _without_rule(op, args, kwargs)
    # the rule failed, or the user's sizes don't fit: the op itself decides, on fake global tensors
    except Exception as error:
        if not _runs_on_whole_tensors(op, args, kwargs):
            raise errors.of_propagation(op, args, kwargs, error) from error
        return _without_rule(op, args, kwargs)
    pairs = torch_private.flat_specs(info, sharding)
    if _is_wrong(op, args, kwargs, sharding.output_spec, [then for _, then in pairs]):
        return _without_rule(op, args, kwargs)
    # Not for views: a slice of all rows moves nothing, but at another size the same arguments may
    # mean fewer rows. Not for `out=`, which changes the layout of its argument, nor for random ops,
    # which draw for the global tensor.
    if not facts_of(op).is_view and not facts_of(op).is_out and op not in torch_private.RANDOM_OPS:
        learn_for_any_size(request, sharding)
    if not torch_private.is_member(info.compute_mesh):
        return _absent(op, args, sharding.output_spec)
    if _moves_what_is_written(request, pairs) or torch_private.masks_what_moves(pairs):
        return _without_rule(op, args, kwargs)
    if pairs and errors.is_foreach(op):
        reduced = reduced_together(args, pairs, partial(_report, op))
        if reduced is not None:
            # the rule is asked again: reduced arguments have other placements
            return run(Request(DTensor, op, reduced, kwargs))
    for now, then in pairs:
        _note(op, now, then.placements)
    return _on_local_tensors(request, info, sharding, pairs)


def _on_local_tensors(
    request: Request,
    info: Any,
    sharding: OutputSharding,
    pairs: list[tuple[DTensorSpec, DTensorSpec]],
) -> Any:
    """The result of the local op, on arguments redistributed as the rule asks."""
    op, args, kwargs = request.op, request.args, request.kwargs
    local_args = torch_private.local_arguments(info, sharding)
    if op in torch_private.RANDOM_OPS:
        return _random(op, args, kwargs, local_args, sharding.output_spec)
    local_op = torch_private.local_op(op, sharding)
    result = local_op(*local_args, **info.local_kwargs)
    made = _wrapped(op, args, kwargs, result, sharding.output_spec)
    # `at_once` repeats the local op alone: a call that redistributes is more than that
    if any(now.placements != then.placements for now, then in pairs):
        return made
    return _learnt(request, local_op, local_args, info.local_kwargs, made)


def _moves_what_is_written(request: Request, pairs: list[tuple[DTensorSpec, DTensorSpec]]) -> bool:
    """Whether the rule redistributes an argument that the op writes: the write would be lost.

    torch's rules for lists consider the first argument only, but fused optimizers write several.
    Its rules for `scatter_add_` and its like don't consider that the first one is written at all.
    """
    if request.facts.is_out or not request.written():
        return False
    placed = [t._spec for t in request.written() if isinstance(t, DTensor)]
    return any(
        now.placements != then.placements and any(now is spec for spec in placed)
        for now, then in pairs
    )


def _at_this_size(request: Request, placements: Any) -> Any:
    """The result of a call that was decided for other sizes, by the local op alone.

    NotImplemented if torch's rules must be asked.
    """
    if not torch_private.is_member(_mesh_of(request)):
        return NotImplemented
    op, args, kwargs = request.op, request.args, request.kwargs
    # asked for before the op runs: it may write, so that the rules can't be asked afterwards
    specs = _specs_at_this_size(request, placements)
    if specs is None:
        return NotImplemented
    local = [_local(argument) for argument in args]
    result = op(*local, **{name: _local(a) for name, a in kwargs.items()})
    return _learnt(request, op, local, kwargs, _wrapped(op, args, kwargs, result, specs))


def _learnt(request: Request, op: Any, args: Any, kwargs: dict[str, Any], result: Any) -> Any:
    """`result`, once `at_once` has learnt that the call is `op` on these local arguments.

    Only where nothing is recorded: a recorded call is found in the trie.
    """
    if here.trace.policy.cold:
        at_once.learn(request, op, args, kwargs, result)
    return result


def _specs_at_this_size(request: Request, placements: Any) -> Any:
    """The output specs for known placements, with the metadata that the op has on global tensors.

    None if torch's rules must be asked: the op can't be recorded, or it returns nothing.
    """
    mesh = _mesh_of(request)
    with dispatch_private.no_modes():
        outcome = outcome_of_call(here.trace, request)
    if outcome.runs_now is not None:
        return None
    facts = request.facts
    if facts.returns_arg is not None:
        return request.args[facts.returns_arg]._spec
    if facts.returns_nothing:
        return None

    def spec(placed: Any, meta: Any) -> DTensorSpec:
        size, stride, _, dtype, _ = meta
        tensor_meta = torch_private.TensorMeta(torch.Size(size), tuple(stride), dtype)
        return torch_private.spec_of(mesh, placed, tensor_meta)

    if outcome.is_single:
        return spec(placements, outcome.outs[0])
    if len(placements) != len(outcome.outs) or any(meta is None for meta in outcome.outs):
        return None
    return tuple(map(spec, placements, outcome.outs))


def _groups(tensors: Any) -> list[list[int]]:
    """The indices of the tensors of each mesh, and of the plain ones: a list for each."""
    groups: dict[Any, list[int]] = {}
    for i, tensor in enumerate(tensors):
        mesh = tensor.device_mesh if isinstance(tensor, DTensor) else None
        groups.setdefault(mesh, []).append(i)
    return list(groups.values())


def _group_by_group(
    op: Any, args: tuple[Any, ...], kwargs: dict[str, Any], groups: list[list[int]]
) -> Any:
    """A foreach call on lists with several meshes: one call for the tensors of each mesh."""
    n = sum(map(len, groups))

    def part(argument: Any, places: list[int]) -> Any:
        # lists of another length hold no item for each tensor
        is_list = isinstance(argument, (list, tuple)) and len(argument) == n
        return [argument[i] for i in places] if is_list else argument

    found: list[Any] = [None] * n
    for places in groups:
        given = {name: part(argument, places) for name, argument in kwargs.items()}
        made = op(*[part(argument, places) for argument in args], **given)
        if made is not None:
            for i, tensor in zip(places, made, strict=True):
                found[i] = tensor
    return None if op._schema.returns == [] else found


def _stacked(op: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """`stack` of 0-dim tensors on several meshes, or plain: gathered first, as norms of gradients
    need it when they are clipped.

    NotImplemented for other tensors, for which `errors.check_arguments` then raises.
    """
    tensors = args[0]
    if len(_groups(tensors)) > 1 and not any(tensor.ndim for tensor in tensors):
        return op([_whole(op, tensor) for tensor in tensors], *args[1:], **kwargs)
    return NotImplemented


def _whole(op: Any, tensor: torch.Tensor) -> torch.Tensor:
    """The gathered tensor, plain."""
    if not isinstance(tensor, DTensor):
        return tensor
    return local_of(_moved_unasked(op, tensor, everywhere(tensor.device_mesh)))


def _mesh_of(request: Request) -> DeviceMesh:
    return next(t.device_mesh for t in request.tensors if isinstance(t, DTensor))


def _changed(argument: Any, change: Callable[[torch.Tensor], Any]) -> Any:
    """An argument or a result, with `change(tensor)` in place of each tensor."""
    if isinstance(argument, torch.Tensor):
        return change(argument)
    if isinstance(argument, (list, tuple)):
        return type(argument)([_changed(item, change) for item in argument])
    return argument


def _local(argument: Any) -> Any:
    """The argument with local tensors for sharded ones."""
    return _changed(argument, lambda t: local_of(t) if isinstance(t, DTensor) else t)


def _mean_of_losses(op: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """The mean loss over targets that aren't ignored, and their weight.

    Ranks may have different numbers of such targets, so a mean of the ranks' means is wrong. The
    sums of losses and of weights are reduced, and then divided.
    """
    losses, weights = run(Request(DTensor, op, (*args[:3], SUM, *args[4:]), kwargs))
    whole = everywhere(losses.device_mesh)
    # not reported to torch's context: torch leaves the mean partial, and moves nothing here
    for reduced in (losses, weights):
        _note(op, reduced._spec, whole)
    losses, weights = _moved(losses, whole), _moved(weights, whole)
    return losses / weights, weights


def _wrapped(op: Any, args: tuple[Any, ...], kwargs: dict[str, Any], result: Any, spec: Any) -> Any:
    """The op's result, sharded as `spec` says. An in-place op returns the argument it wrote."""
    facts = facts_of(op)
    if facts.is_out:
        return _written_out(op, kwargs, spec)
    if facts.writes and (facts.returns_arg is not None or facts.returns_nothing):
        if facts.returns_arg is None:
            return None
        written = args[facts.returns_arg]
        if facts.changes_metadata:  # `squeeze_` and its like
            become(written, sharded(result, spec))
        return written
    return _wrap(result, spec)


def _wrap(result: Any, spec: Any) -> Any:
    """Sharded tensors for the tensors of a local result; those without a spec stay plain."""
    if isinstance(result, torch.Tensor):
        if spec is None:
            return result
        return sharded(result, torch_private.unmasked(result, spec))
    if isinstance(result, (list, tuple)):
        specs = spec if isinstance(spec, (list, tuple)) else [spec] * len(result)
        items = [_wrap(item, its) for item, its in zip(result, specs, strict=True)]
        return items if isinstance(result, list) else tuple(items)
    return result


def _written_out(op: Any, kwargs: dict[str, Any], spec: Any) -> Any:
    """The `out=` arguments, once they have got the placements of the result."""
    outs = _outs(op, kwargs)
    specs = spec if isinstance(spec, (list, tuple)) else [spec] * len(outs)
    for out, its in zip(outs, specs, strict=True):
        become(out, sharded(local_of(out), its))
    return tuple(outs) if len(outs) > 1 else outs[0]


def _outs(op: Any, kwargs: dict[str, Any]) -> list[Any]:
    return [kwargs[argument.name] for argument in op._schema.arguments if argument.is_out]


def _ours(result: Any) -> Any:
    """The results of one of torch's handlers, with our DTensors in place of torch's."""
    return _changed(result, lambda t: adopted(t) if isinstance(t, TorchDTensor) else t)


def _moved(tensor: DTensor, placements: tuple[Any, ...]) -> DTensor:
    """`tensor` with other placements, by collectives on the local tensor: part of a call's steps.

    `tensor.moved` records a sharded call of its own instead.
    """
    spec = tensor._spec
    target = spec_with(spec, placements)
    local = torch_private.redistribute_local_tensor(local_of(tensor), spec, target)
    return sharded(local, target)


def _moved_unasked(op: Any, tensor: DTensor, placements: tuple[Any, ...]) -> DTensor:
    """As `_moved`, for an implicit redistribution, which is reported."""
    _report(op, tensor._spec, spec_with(tensor._spec, placements))
    return _moved(tensor, placements)


def _report(op: Any, now: DTensorSpec, then: DTensorSpec) -> None:
    """As `_note`, and to torch's context too: for redistributions that no code of torch makes."""
    torch_private.observe_redistribution(op, now, then)
    _note(op, now, then.placements)


def _note(op: Any, now: DTensorSpec, placements: tuple[Any, ...]) -> None:
    """Count an implicit redistribution for reports; RuntimeError if `forbid` has it."""
    pairs = list(zip(now.placements, placements, strict=True))
    if not any(before != after and not before.is_replicate() for before, after in pairs):
        return  # a replicated tensor is cut on each rank, which moves no data
    meta = now.tensor_meta
    assert meta is not None, "it is a tensor's"
    n_bytes = meta.shape.numel() * meta.dtype.itemsize
    where = user_line()
    if "redistribute" in settings.current().forbid:
        raise errors.forbidden(op, now, placements, n_bytes, where)
    STATS.redistributions[str(op), str(now.placements), str(tuple(placements)), where] += n_bytes


def _runs_on_whole_tensors(op: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """Whether the op accepts tensors of these sizes: then torch's rule failed, not the program.

    True too if the sizes of the result depend on values, which fake tensors don't have.
    """
    template, named, metas = numbered(Request(DTensor, op, args, kwargs))

    def call(stand_ins: list[torch.Tensor]) -> Any:
        plain = [substituted(argument, stand_ins) for argument in template]
        return op(*plain, **{name: substituted(a, stand_ins) for name, a in named})

    try:
        dispatch_private.fake_call(metas, call)
    except dispatch_private.NoMetaFunction:
        return True
    except Exception as error:
        return "Dynamic" in type(error).__name__ or "DataDependent" in type(error).__name__
    return True


def _is_wrong(
    op: Any, args: tuple[Any, ...], kwargs: dict[str, Any], spec: Any, wanted: list[DTensorSpec]
) -> bool:
    """Whether torch's rule, with these placements, would give another result than one process.

    Where several mesh dimensions split one tensor dimension unevenly, rules count parts wrongly.
    Kernels may raise an error on an empty part. An average of the ranks' averages is wrong where
    parts differ in size. `spec` is the output's, `wanted` are the arguments' after redistribution.
    """
    specs = [
        its for its in (spec if isinstance(spec, (list, tuple)) else [spec]) if its is not None
    ]
    given = [t._spec for t in Request(DTensor, op, args, {}).tensors if isinstance(t, DTensor)]
    if any(parts_of(its).split_twice for its in (*given, *specs)):
        return True
    if corrections.needs_whole(op, args, kwargs, given):
        return True
    if op in WHOLE_ONLY and any(p.is_shard() for its in given for p in its.placements):
        return True
    # many kernels raise on an empty part: a maximum, for example, has no value there
    takes_nothing = torch.Tag.pointwise in op.tags or op in OF_ANY_SIZE or errors.is_foreach(op)
    if op is aten.view.default:
        takes_nothing = _keeps_sharded_dims(*args)
    if not takes_nothing and any(parts_of(its).may_be_empty for its in (*given, *wanted)):
        return True
    averages = any(
        getattr(placement, "reduce_op", None) == "avg"
        for its in specs
        for placement in its.placements
    )
    return averages and any(parts_of(its).uneven for its in given)


def _keeps_sharded_dims(tensor: Any, size: Sequence[int]) -> bool:
    """Whether a view of this size keeps all dimensions up to the last that is split.

    A size of -1 doesn't count, as it can't be computed on an empty part.
    """
    last = max((p.dim for p in tensor.placements if p.is_shard()), default=-1)
    return -1 not in size and tuple(size[: last + 1]) == tensor.shape[: last + 1]


def _without_rule(op: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """The call without a sharding rule: decomposed if it is composite, else on gathered arguments.

    Results of gathered arguments are replicated. Writes go back to the sharded arguments.
    """
    request, facts = Request(DTensor, op, args, kwargs), facts_of(op)
    if dispatch_private.is_composite(op):
        before = _here.is_composite
        is_sharded = all(isinstance(tensor, DTensor) for tensor in request.tensors)
        _here.is_composite = before or is_sharded
        try:
            result = dispatch_private.decompose(op, args, kwargs)
        finally:
            _here.is_composite = before
        if result is not NotImplemented:
            return result
    mesh = _mesh_of(request)
    whole: dict[int, torch.Tensor] = {}
    whole_kwargs = {name: _gathered(op, a, whole) for name, a in kwargs.items()}
    result = op(*_gathered(op, args, whole), **whole_kwargs)
    for written in request.written():
        # after a change of shape the old placements may fit no more: the argument is replicated
        if isinstance(written, DTensor) and facts.changes_metadata:
            become(written, _replicated(whole[id(written)], mesh))
        elif isinstance(written, DTensor):
            _put_back(written, whole[id(written)])
    if facts.returns_arg is not None:
        return args[facts.returns_arg]
    if facts.is_out:
        outs = _outs(op, kwargs)
        return tuple(outs) if len(outs) > 1 else outs[0]
    return _replicated(result, mesh)


def _gathered(op: Any, argument: Any, whole: dict[int, torch.Tensor]) -> Any:
    """`argument` with sharded tensors gathered, each once; `whole` has the gathered ones by id.

    The caller finds there what the op has written.
    """

    def gathered(tensor: torch.Tensor) -> torch.Tensor:
        if not isinstance(tensor, DTensor):
            return tensor
        if id(tensor) not in whole:
            local = _whole(op, tensor)
            # gathered memory is dense in the order of dimensions: the op must see the strides of
            # the global tensor, on which those of its result depend
            if local.stride() != tensor.stride() and 0 not in tensor.stride():
                local = torch.empty_strided(
                    tensor.shape, tensor.stride(), dtype=local.dtype, device=local.device
                ).copy_(local)
            whole[id(tensor)] = local
        return whole[id(tensor)]

    return _changed(argument, gathered)


def _put_back(tensor: DTensor, whole: torch.Tensor) -> None:
    """Write the changed values of a gathered copy back to the sharded tensor."""
    part = part_of(whole, tensor._spec)
    local = local_of(tensor)
    if local is not part:
        local.copy_(part)


class _Here(threading.local):
    """This thread's state.

    `is_composite`: an op is being decomposed that had sharded tensors only. Plain tensors that the
    decomposition makes follow from sizes, so they are equal on all ranks and count as replicated.
    Random ones are equal if the ranks' generators are.
    """

    is_composite = False


_here = _Here()


def _without_plain(request: Request) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """The arguments with replicated DTensors for plain tensors of more than one element."""
    mesh = _mesh_of(request)

    def replicated(tensor: torch.Tensor) -> torch.Tensor:
        if isinstance(tensor, DTensor) or tensor.numel() == 1:
            return tensor
        made: torch.Tensor = _replicated(tensor, mesh)
        return made

    args, kwargs = request.mapped(replicated, None)
    return args, dict(kwargs)


def _replicated(result: Any, mesh: Any) -> Any:
    """Replicated DTensors for the plain tensors of a result that each rank has computed."""

    def replicated(tensor: torch.Tensor) -> DTensor:
        meta = torch_private.TensorMeta(tensor.shape, tensor.stride(), tensor.dtype)
        return sharded(tensor, torch_private.spec_of(mesh, everywhere(mesh), meta))

    return _changed(result, replicated)


def _absent(op: Any, args: tuple[Any, ...], spec: Any) -> Any:
    """The result on a rank outside the mesh, as in torch: empty local tensors, zeros for 0-dim."""
    facts = facts_of(op)
    if facts.returns_arg is not None:
        return args[facts.returns_arg]
    if facts.returns_nothing:
        return None
    if isinstance(spec, DTensorSpec):
        meta = spec.tensor_meta
        assert meta is not None, "it is a tensor's"
        size = (0,) if meta.shape else ()
        return sharded(torch.zeros(size, dtype=meta.dtype, device=spec.mesh.device_type), spec)
    if isinstance(spec, (list, tuple)):
        return type(spec)([None if s is None else _absent(op, args, s) for s in spec])
    return None


def _random(
    op: Any, args: tuple[Any, ...], kwargs: dict[str, Any], local_args: Any, spec: Any
) -> Any:
    """The result of a random op: each rank draws for the global tensor, and keeps its part.

    So the numbers are those that one process draws with the same seed, whatever the mesh.
    """
    request = Request(DTensor, op, args, kwargs)
    target = args[0]
    if op is aten.native_dropout.default:
        return _dropout(request, local_args[0], spec)
    own = spec[0] if isinstance(spec, (list, tuple)) else spec
    if facts_of(op).returns_arg is not None:
        part = part_of(drawn(here.trace, Draw(request, like=target)), target._spec)
        local_of(target).copy_(part)
        return target
    # bernoulli compares its random numbers with the values of its argument, so it needs them whole
    if op is aten.bernoulli.default:
        return sharded(part_of(op(_whole(op, target), *args[1:], **kwargs), own), own)
    return sharded(part_of(drawn(here.trace, Draw(request, like=target)), own), own)


def _dropout(request: Request, local: torch.Tensor, spec: Any) -> Any:
    """Dropout as `op_handlers._dropout` records it, with this rank's part of the global mask."""
    p, trains = request.args[1], request.argument("train")
    if trains is False or local.numel() == 0:
        return _wrap(request.op(local, p, trains), spec)
    mask = part_of(
        drawn(here.trace, Draw(request, like=request.args[0], zeroed=True, item=1)), spec[1]
    )
    scale = 0.0 if p == 1 else 1.0 / (1.0 - p)
    return sharded(local.mul(mask).mul_(scale), spec[0]), sharded(mask, spec[1])


def _item(op: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """The number in a tensor of one element, which is gathered, or reduced, if it is split."""
    tensor = args[0]
    if not _is_split(tensor):
        return op(local_of(tensor))
    replicated = everywhere(tensor.device_mesh)
    # not reported to torch's context: torch itself reads a value in any of its contexts
    _note(op, tensor._spec, replicated)
    return op(local_of(_moved(tensor, replicated)))


def _equal(op: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """Whether two tensors are equal on all ranks: each compares its parts, the minimum decides."""
    request = Request(DTensor, op, args, kwargs)
    errors.check_arguments(request)
    first, second = args
    if first.shape != second.shape:
        return False
    mesh = _mesh_of(request)
    if not torch_private.is_member(mesh):
        return True  # this rank has no part of them
    tensors = [t if isinstance(t, DTensor) else _replicated(t, mesh) for t in args]
    # to cut a replicated tensor as the other one is cut moves no data
    cut = [
        t.placements
        for t in tensors
        if _is_split(t) and not any(p.is_partial() for p in t.placements)
    ]
    placements = cut[0] if cut else everywhere(mesh)
    mine, theirs = (local_of(_moved_unasked(op, t, placements)) for t in tensors)
    same = torch.tensor(float(torch.equal(mine, theirs)), device=mine.device)
    return bool(torch_private.minimum_over(same, mesh).item())


def _handles_convolution(n_images: int, args: tuple[Any, ...]) -> bool:
    """Whether a convolution's images are replicated or split evenly by sample, and weights are
    replicated.

    torch's handler also exchanges the edges of images that are split by width, but not for all
    strides and paddings. The first `n_images` arguments are images, the rest up to the third are
    weights.
    """
    images = [image for image in args[:n_images] if isinstance(image, DTensor)]
    weights = [weight for weight in args[n_images:3] if isinstance(weight, DTensor)]
    if any(map(_is_split, weights)) or len({image.placements for image in images}) > 1:
        return False
    return not any(
        parts_of(image._spec).uneven or (not p.is_replicate() and p != Shard(0))
        for image in images
        for p in image.placements
    )


def _is_split(argument: Any) -> bool:
    """Whether it is a DTensor that is sharded or partial."""
    return isinstance(argument, DTensor) and not all(p.is_replicate() for p in argument.placements)


MEAN, SUM = 1, 2  # as at::Reduction has them
LOSSES = (aten.nll_loss_forward.default, aten.nll_loss2d_forward.default)


def _keeps_strides(args: tuple[Any, ...]) -> bool:
    """Whether `as_strided` asks for the size and the strides that the tensor has: torch's handler
    raises for others."""
    tensor, size, stride = args[:3]
    offset = args[3] if len(args) > 3 else None
    return tensor.shape == tuple(size) and tensor.stride() == tuple(stride) and not offset


OF_ANY_SIZE = frozenset({
    aten._to_copy.default, aten.alias.default, aten.clone.default, aten.copy_.default,
    aten.detach.default, aten.full_like.default, aten.native_layer_norm.default,
    aten.native_layer_norm_backward.default, aten.ones_like.default, aten.permute.default,
    aten.select.int, aten.slice.Tensor, aten.split.Tensor, aten.split_with_sizes.default,
    aten.sum.default, aten.sum.dim_IntList, aten.t.default, aten.transpose.int, aten.unbind.int,
    aten.unsqueeze.default, aten.zero_.default, aten.zeros_like.default,
})  # fmt: skip
"""Ops besides pointwise and foreach ones whose kernels accept an empty part."""
WHOLE_ONLY = frozenset({
    aten.linalg_ldl_solve.default, aten.linalg_solve_triangular.default,
    aten.pixel_shuffle.default, aten.pixel_unshuffle.default, aten.squeeze_copy.default,
    aten.squeeze_copy.dim, aten.squeeze_copy.dims, aten.view_copy.default,
})  # fmt: skip
"""Ops whose rules in torch treat a part as if it were the whole: they get gathered arguments."""
UNSURE: dict[Any, Callable[[tuple[Any, ...]], bool]] = {
    aten.convolution.default: partial(_handles_convolution, 1),
    aten.convolution_backward.default: partial(_handles_convolution, 2),
    aten.as_strided.default: _keeps_strides,
}
"""Ops whose handlers in torch are right for some arguments only: the functions test for those."""


def _place_of_extreme(op: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """`argmax` and `argmin`: torch's handler needs equal parts, and gathers wrongly along a
    dimension that is counted from the end.

    Of equal extremes it returns that of the first rank. Without `dim` that is the first one only if
    the first rank's elements come before the others'.
    """
    tensor, dim = args[0], args[1] if len(args) > 1 else kwargs.get("dim")
    parts = parts_of(tensor._spec)
    in_turn = dim is not None or all(p.is_replicate() or p == Shard(0) for p in tensor.placements)
    if parts.uneven or parts.split_twice or not in_turn:
        return _without_rule(op, args, kwargs)
    if dim is not None and -tensor.ndim <= dim < 0:
        keepdim = args[2] if len(args) > 2 else kwargs.get("keepdim", False)
        args, kwargs = (tensor, dim + tensor.ndim, keepdim), {}
    return _ours(torch_private.handler_of(op)(op, args, kwargs))


def _logsumexp(op: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """`logsumexp` with `keepdim` as a keyword: torch's rule doesn't look for it elsewhere."""
    if len(args) < 3:
        return NotImplemented
    return run(Request(DTensor, op, args[:2], {"keepdim": args[2]}))


def _filled(op: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """`fill_`: of a Partial tensor the first rank has the number, the others what changes nothing.

    The tensor stays Partial, as do the tensors that share its memory.
    """
    tensor = args[0]
    if isinstance(args[1], DTensor):
        args = (tensor, _whole(op, args[1]))
    local = local_of(tensor)
    op(local, *args[1:], **kwargs)
    if any(hasattr(placement, "norm_type") for placement in tensor.placements):
        tensor._spec = _reduced(tensor._spec)  # a norm of parts can't make up a negative number
        return tensor
    count_once_(local, tensor._spec)
    return tensor


def _put(op: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """`index_put_` with masks: torch's rule keeps a mask whole while the tensor is split."""
    tensor, indices, values, *_ = args
    masks = [i for i in indices if i is not None and i.dtype in (torch.bool, torch.uint8)]
    if not masks:
        return NotImplemented
    # one value at a mask of the tensor's own size is pointwise, and moves no data
    if len(args) == 3 and not kwargs and masks[0].shape == tensor.shape and values.ndim == 0:
        return run(Request(DTensor, aten.masked_fill_.Tensor, (tensor, masks[0], values), {}))
    return _without_rule(op, args, kwargs)


def _uninitialized(op: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """`empty_like`: memory for the local tensor; of a partial tensor it is replicated."""
    made = op(local_of(args[0]), **kwargs)
    spec = spec_with(args[0]._spec, _reduced(args[0]._spec).placements, made.dtype)
    return sharded(made, spec)


def _new(op: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """`new_ones` and its like of a partial tensor: replicated, as ranks would add up the ones."""
    tensor = args[0]
    if not any(placement.is_partial() for placement in tensor.placements):
        return NotImplemented
    return _replicated(op(local_of(tensor), *args[1:], **kwargs), tensor.device_mesh)


def _reduced(spec: DTensorSpec) -> DTensorSpec:
    """The spec with Replicate for Partial placements."""
    if not any(placement.is_partial() for placement in spec.placements):
        return spec
    return spec_with(spec, torch_private.normalized_for_gradient(spec.placements))


def _any(op: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """`any` of a split tensor, by counts: torch's rule adds up the ranks' answers."""
    tensor, *dims_and_keepdim = args
    if kwargs or not _is_split(tensor):
        return NotImplemented
    found = run(Request(DTensor, aten.ne.Scalar, (tensor, 0), {}))
    # an empty list means no dimension here, unlike in `sum`
    if not dims_and_keepdim or dims_and_keepdim[0] != []:
        count = aten.sum.dim_IntList if dims_and_keepdim else aten.sum.default
        if dims_and_keepdim and isinstance(dims_and_keepdim[0], int):
            dims_and_keepdim[0] = [dims_and_keepdim[0]]
        counts = run(Request(DTensor, count, (found, *dims_and_keepdim), {}))
        found = run(Request(DTensor, aten.ne.Scalar, (counts, 0), {}))
    if tensor.dtype is not torch.uint8:
        return found
    # of bytes the answer is a byte
    return run(Request(DTensor, aten._to_copy.default, (found,), {"dtype": torch.uint8}))


SPECIAL: dict[Any, Callable[..., Any]] = {
    aten.any.default: _any,
    aten.any.dim: _any,
    aten.any.dims: _any,
    aten.argmax.default: _place_of_extreme,
    aten.argmin.default: _place_of_extreme,
    aten.empty_like.default: _uninitialized,
    aten.fill_.Scalar: _filled,
    aten.fill_.Tensor: _filled,
    aten.index_put_.default: _put,
    aten._local_scalar_dense.default: _item,
    aten.equal.default: _equal,
    aten.logsumexp.default: _logsumexp,
    aten.new_full.default: _new,
    aten.new_ones.default: _new,
    aten.stack.default: _stacked,
}
