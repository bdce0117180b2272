"""Extends the trie: makes the state that a call leads to, when the call is new at its place.

In: a call whose tensors all have slots. Out: a new `State`, or the reason to run the call now. The
metadata of outputs come from closed forms or from the schema cache. A number that varies from run
to run becomes a run-time input here. Called by `recorder`, and for links and metadata by sharding.
"""

from __future__ import annotations

from functools import lru_cache
from time import perf_counter
from typing import Any

import torch

from lazy_tensor.dispatch import settings, torch_private
from lazy_tensor.dispatch.metadata import eager_checks
from lazy_tensor.dispatch.metadata.infer import (
    LEARNED,
    OUT_DIFFERS,
    Meta,
    Outcome,
    dense_stride,
    is_marked,
    known_outcome,
    learn,
    meta_of,
    needs_fakes,
    propagate,
)
from lazy_tensor.dispatch.metadata.kernel_probe import corrected_by_probe
from lazy_tensor.dispatch.metadata.shape_formulas import closed_form
from lazy_tensor.dispatch.ops.request import Request, record_again, scalar_refs
from lazy_tensor.dispatch.ops.rules import METADATA_FROM_RUN
from lazy_tensor.dispatch.ops.schema import POWERS, functional_of
from lazy_tensor.dispatch.record import moving_index
from lazy_tensor.dispatch.record.inputs import index_of, is_in
from lazy_tensor.dispatch.record.memory_overlap import overlaps
from lazy_tensor.dispatch.record.segment_end import closes_segment
from lazy_tensor.dispatch.run.flush import flush, must_record
from lazy_tensor.dispatch.stats import STATS
from lazy_tensor.dispatch.trie.keys import fit_kernels
from lazy_tensor.dispatch.trie.trace import MANY, MARKED, NOTHING, ONE, SELF, Node, State, Trace
from lazy_tensor.dispatch.user_frame import user_line
from lazy_tensor.kernels.segment import Ref, TensorSpec, n_bytes, ref


def cut_if_full(trace: Trace) -> None:
    """Flush a trace that has reached a bound (`max_segment_ops`, ...), or that may not grow.

    A trace that may not grow goes cold.
    """
    limits = settings.current()
    # Another thread has changed the environment. Only an empty trace can move to another root.
    if trace.is_outdated:
        trace.restart()
    state = trace.state
    # The call has not come in this order before, so recording it would hardly pay.
    if not (trace.policy.may_grow() or must_record(trace)):
        flush(trace, "nothing repeats", quiet=True)
        trace.policy.cold = 1
        STATS.counts["went_cold"] += 1
    if state.n_ops >= limits.max_segment_ops:
        flush(trace, "max_segment_ops", quiet=True)
    elif state.n_bytes >= limits.max_pending_bytes:
        flush(trace, "max_pending_bytes", quiet=True)


def grow(
    trace: Trace,
    request: Request,
    key: tuple[Any, ...],
    generic_key: tuple[Any, ...],
    numbers: list[complex],
) -> State | str | None:
    """The state after `request`, made and linked. A string is the reason to run the call now.

    None if the call's tensors are no longer in the trace; nothing is changed then. A finalizer or a
    meta function may call ops, and these may flush the trace.
    """
    call = numbered(request)
    # An op that runs once to tell its metadata isn't recorded, and may have to flush.
    may_run = not (must_record(trace) or "flush" in settings.current().forbid)
    outcome = _outcome(trace, request, *call, may_run=may_run)
    reason = outcome.runs_now
    # A state has a place for the conjugate and the negative bit only if the call gives one view.
    if reason is None and request.facts.is_view and is_marked(viewed := request.tensors[0]):
        if not outcome.is_single:
            reason = "gives several conjugate or negative views"
        elif outcome.outs[0] is not None and outcome.outs[0][3] != viewed.dtype:
            reason = "views a conjugate, or a negative, as another dtype"
    # `_outcome` may have run other ops, and with them a flush
    if reason is None and not all(is_in(trace, tensor) for tensor in request.tensors):
        return None
    if reason is None and request.facts.writes and overlaps(trace, request):
        reason = "what is written overlaps"
    if reason is not None:
        trace.policy.add_growth(perf_counter() - request.began_s)
        return reason
    parent = trace.state
    may_vary = bool(numbers) and fit_kernels(numbers) and not _stay_in_key(request)
    is_generic = may_vary and _varies(trace, parent, request, key, generic_key)
    if is_generic:
        refs = scalar_refs(parent.n_scalars)
        args, kwargs = request.mapped(lambda tensor: ref(index_of(trace, tensor)), refs)
        state = State(parent, generic_key, None)
        state.n_scalars += len(numbers)
    else:
        slots = [index_of(trace, tensor) for tensor in request.tensors]
        args, kwargs = _placed(call[0], slots), _placed(call[1], slots)
        state = State(parent, key, None)
    _fill(state, trace, request, outcome, args, kwargs)
    link(trace, parent, trace.similar_to(parent), state, key, generic_key)
    if not is_generic:
        moving_index.note(trace, parent, request, state)
    trace.note_new(state)
    trace.policy.add_growth(perf_counter() - request.began_s)
    return state


USUAL_POWERS = frozenset({-2, -1, -0.5, 0.5, 1, 2, 3})
"""Exponents for which kernels have products and roots in place of `pow`: those of `loops.rules`."""
MOST_VARYING = 10_000
"""Signatures in `Trace.varying`: one more, and the set begins anew."""


def _varies(
    trace: Trace, parent: State, request: Request, key: tuple[Any, ...], generic: tuple[Any, ...]
) -> bool:
    """Whether the call's numbers vary, so that they become run-time inputs.

    They do if the call came with other numbers before, here or at the similar place. They also do
    if calls of the same signature vary anywhere in the program.
    """
    signature = (request.op, request.mapped(lambda _: None, type))
    similar = trace.similar_to(parent)
    # The exact key has missed, so a known generic key came with other numbers.
    if generic in (parent.seen or ()) or (
        similar is not None and key not in similar and generic in (similar.seen or ())
    ):
        if len(trace.varying) >= MOST_VARYING:
            trace.varying.clear()
        trace.varying.add(signature)
    return signature in trace.varying


def _stay_in_key(request: Request) -> bool:
    """Whether the call's numbers stay in its key.

    They do if it raises for some: so each new one is checked here, at its line. So do usual powers,
    for which a kernel that knows the exponent is several times as fast.
    """
    if request.op._schema.name not in POWERS:
        return request.facts.checks_numbers
    is_of_integers = not any(t.is_floating_point() or t.is_complex() for t in request.tensors)
    exponent = request.args[1]
    return is_of_integers or (isinstance(exponent, (int, float)) and exponent in USUAL_POWERS)


def link(
    trace: Trace, parent: State, similar: State | None, state: State,
    key: tuple[Any, ...], generic_key: tuple[Any, ...],
) -> None:  # fmt: skip
    """Have `parent` lead to the new `state` by whichever of these keys the state has.

    Also find the similar state: where `parent`, or the place similar to it, led by the same call,
    whatever its numbers.
    """
    # The similar path is that of an earlier run. Behind the first number that differs every state
    # is new, and has seen no calls. So further numbers are compared with those on the similar path:
    # all that vary are found in this run.
    trace.similar_path = None
    for known in (parent, similar):
        if known is not None and (found := _like(known, key, generic_key)) is not None:
            trace.similar_path = (state, found)
            break
    if state.key is key:
        parent[key] = state
        # one object serves as both keys if the call has no number that may vary
        if key is not generic_key:
            parent.seen = parent.seen or {}
            parent.seen[generic_key] = state
    else:
        parent.generic = parent.generic or {}
        parent.generic[generic_key] = state


def _like(state: State, key: tuple[Any, ...], generic_key: tuple[Any, ...]) -> State | None:
    """Where `state` led by the same call: with the same numbers if it did, else with others."""
    for children, name in ((state, key), (state.seen, generic_key), (state.generic, generic_key)):
        if children and name in children:
            return children[name]
    return None


Args = tuple[Any, ...]
Kwargs = tuple[tuple[str, Any], ...]


def outcome_of_call(trace: Trace, request: Request) -> Outcome:
    """The metadata of the call's outputs, from its inputs' metadata.

    Of a sharded tensor these are the global ones.
    """
    return _outcome(trace, request, *numbered(request))


def numbered(request: Request) -> tuple[Args, Kwargs, list[Meta]]:
    """The call's arguments with tensors replaced by their numbers, and the tensors' metadata."""
    metas: list[Meta] = []

    def number(tensor: torch.Tensor) -> Ref:
        metas.append(meta_of(tensor))
        return ref(len(metas) - 1)

    args, kwargs = request.mapped(number, None)
    return args, kwargs, metas


def _placed(arguments: tuple[Any, ...], slots: list[int]) -> tuple[Any, ...]:
    """`numbered` arguments with the tensors' numbers replaced by slots."""
    return tuple([
        ref(slots[a.index]) if type(a) is Ref else _placed(a, slots) if type(a) is tuple else a
        for a in arguments
    ])  # fmt: skip


def _outcome(
    trace: Trace,
    request: Request,
    args: Args,
    kwargs: Kwargs,
    metas: list[Meta],
    *,
    may_run: bool = False,
) -> Outcome:
    """The metadata of the call's outputs: by a closed form, the schema cache, or a meta function.

    With `may_run` an op may run once to tell them (`LEARNED`), if fake tensors aren't there yet.
    """
    facts = request.facts
    if facts.is_out:
        return _outcome_of_out(trace, request, may_run=may_run)
    outcome = closed_form(facts, args, kwargs, metas)
    if outcome is not None:
        return outcome
    # A number's value seldom changes metadata, so calls whose numbers vary share an entry.
    # Where it does, its type is part of the key too: 2 == 2.0, but the results differ in dtype.
    of_numbers = (lambda number: (type(number), number)) if facts.checks_numbers else type
    described = request.mapped(lambda _: Ref, of_numbers)
    # of the environment, these two parts alone decide metadata
    key: tuple[Any, ...] = (request.op._op, described, tuple(metas), *trace.environment[:2])
    if facts.numbers_set_shape:
        key += (tuple(map(type, request.args)),)  # 4 == 4.0, but the results' dtypes differ
    known = known_outcome(key)
    if known is not None:
        return known
    STATS.counts["schema_misses"] += 1
    # The first fake tensor imports torch's compiler, which takes over a second. Running the op once
    # is quicker. It tells as much if the op can run on "meta": then no values decide.
    is_slow = needs_fakes(facts, metas) and not torch_private.has_fakes()
    is_learned = is_slow and may_run and torch_private.has_meta_kernel(request.op)
    if is_learned or request.op in METADATA_FROM_RUN:
        request.learns = key
        return Outcome(runs_now=LEARNED)
    outcome = propagate(facts, args, kwargs, metas)
    if outcome.runs_now is None and not eager_checks.passes(facts, metas):
        outcome = eager_checks.MISFIT
    if outcome.runs_now is None:
        outcome = corrected_by_probe(outcome, facts, args, kwargs, metas)
    return learn(key, outcome)


def _outcome_of_out(trace: Trace, request: Request, *, may_run: bool) -> Outcome:
    """The outcome of a call with `out=`, by that of the same call without it.

    With `may_run` that call may run once to tell it, as in `_outcome`.
    """
    functional, (out,) = functional_of(request.op), request.facts.writes
    assert functional is not None, "else the op isn't recorded (see `rules`)"
    others = {name: value for name, value in request.kwargs.items() if name != out}
    without_out = Request(request.owner, functional, request.args, others)
    outcome = _outcome(trace, without_out, *numbered(without_out), may_run=may_run)
    if outcome.runs_now is LEARNED:
        record_again(request, functional, *request.args, **others)
        outcome = outcome_of_call(trace, without_out)
    if outcome.runs_now is not None:
        return outcome
    (wanted,), given = outcome.outs, meta_of(request.labelled(out))
    is_alike = wanted is not None and (*wanted[:2], *wanted[3:]) == (*given[:2], *given[3:])
    return Outcome(runs_now=None if is_alike else OUT_DIFFERS)


def _fill(
    state: State, trace: Trace, request: Request, outcome: Outcome, args: Args, kwargs: Kwargs
) -> None:
    """Fill in a new state: its node, the metadata of its outputs, and what follows the call."""
    facts = request.facts
    state.n_ops += 1
    viewed = request.tensors[0] if facts.is_view and request.tensors else None
    state.step = node = Node(
        facts=facts,
        args=args,
        kwargs=kwargs,
        outs=_new_slots(state, outcome),
        specs=tuple(map(_spec, outcome.outs)),
        is_single=outcome.is_single,
        writes=tuple([index_of(trace, tensor) for tensor in request.written()]),
        view_of=None if viewed is None else index_of(trace, viewed),
        where=user_line(),
        in_backward=torch_private.in_backward(),
    )
    if viewed is not None:
        # before `_set_kind`, which describes outputs otherwise where offsets are fixed up
        state.offset_fixup = _offset_fixup(trace, request, viewed)
    else:
        # views need no memory of their own: only other outputs count
        for spec in node.specs:
            if spec is not None:
                state.n_bytes += n_bytes(spec)
    _set_kind(trace, request, state, node, outcome)
    if viewed is not None and state.kind == ONE:
        op = request.op
        marks = (viewed.is_conj() ^ (op is CONJ), viewed.is_neg() ^ (op is NEG_VIEW))
        if any(marks):
            state.kind, state.meta = MARKED, (state.meta, marks)
    # Nothing closes on a tape: a flush would take the tape off.
    state.ends_turn = trace.tape is None and trace.policy.past.ends_turn()
    state.closes = state.ends_turn or (trace.tape is None and closes_segment(node, state.n_ops))


def _new_slots(state: State, outcome: Outcome) -> tuple[int | None, ...]:
    """A slot number for each output of the call; None for an output that isn't there."""
    outs: list[int | None] = []
    for meta in outcome.outs:
        outs.append(None if meta is None else state.n_slots)
        state.n_slots += meta is not None
    return tuple(outs)


# Equal specs are one object: a program describes the same few tensors again and again.
@lru_cache(4096)
def _spec(meta: Meta | None) -> TensorSpec | None:
    if meta is None:
        return None
    size, stride, _, dtype, device = meta
    return TensorSpec(tuple(size), tuple(stride), dtype, device)


def _set_kind(trace: Trace, request: Request, state: State, node: Node, outcome: Outcome) -> None:
    """Set the state's kind, and the slots and metadata by which each hit makes the outputs."""
    slots = tuple([None if i is None else trace.slot_at(i) for i in node.outs])
    describe = wrapper_arguments if state.offset_fixup is None else _full_arguments
    metas = tuple([None if meta is None else describe(meta) for meta in outcome.outs])
    if node.facts.returns_arg == 0:
        state.kind, state.meta = SELF, None
    elif node.facts.is_out:
        state.kind, state.meta = SELF, node.facts.writes[0]
    elif node.facts.returns_nothing:
        state.kind, state.meta = NOTHING, node.facts.writes_list
        # Such a kernel for CUDA counts its writes itself. They were counted when recorded, so the
        # run of a plan must not count them again.
        if node.facts.writes_list and any(t.device.type != "cpu" for t in request.tensors):
            state.counts_writes = True
    elif outcome.is_single:
        state.kind, state.slot, state.meta = ONE, slots[0], metas[0]
    else:
        state.kind, state.slot, state.meta = MANY, slots, (outcome.container, metas)


@lru_cache(4096)
def wrapper_arguments(meta: Meta) -> tuple[Any, ...]:
    """`make_wrapper`'s arguments. It makes dense tensors without being given strides, which is
    0.23 us cheaper."""
    size, stride, offset, dtype, device = meta
    if offset == 0 and tuple(stride) == dense_stride(size):
        return (size, None, None, None, dtype, torch.strided, device)
    return _full_arguments(meta)


def _full_arguments(meta: Meta) -> tuple[Any, ...]:
    size, stride, offset, dtype, device = meta
    return (size, stride, offset, None, dtype, torch.strided, device)


CONJ, NEG_VIEW = torch.ops.aten._conj.default, torch.ops.aten._neg_view.default
AS_STRIDED = torch.ops.aten.as_strided.default


def _offset_fixup(trace: Trace, request: Request, viewed: torch.Tensor) -> tuple[int, int] | None:
    """For a view of a leaf with a storage offset: the leaf, and its offset in this run, in bytes.

    A later run may have the leaf at another offset, and moves the view by the difference.
    """
    if request.op is AS_STRIDED and request.argument("storage_offset") is not None:
        return None  # an absolute offset
    leaf: int | None = index_of(trace, viewed)
    if leaf not in trace.leaf_offsets:
        # not a leaf, but maybe a view of one: its value has noted the leaf
        leaf = getattr(getattr(viewed, "_value", None), "leaf", None)
    return None if leaf is None else (leaf, trace.leaf_offsets[leaf])
