"""Recording a hit below Python: the C++ in folder `native`, and what it must know of this package.

In: what `record` does for calls seen before. Out: such calls no longer reach `record`, and cost
about what the op's dispatch costs in eager; a known plan is run by one call. Without a C++ compiler
all goes on in Python.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from lazy_tensor.dispatch import settings
from lazy_tensor.dispatch.ops import composite_overrides
from lazy_tensor.dispatch.ops.rules import Rule, needs_care, reads_values, rule_of
from lazy_tensor.dispatch.ops.schema import facts_of
from lazy_tensor.dispatch.plan.plan import Plan
from lazy_tensor.dispatch.run import input_snapshots
from lazy_tensor.dispatch.tiering.policy import Policy
from lazy_tensor.dispatch.torch_private import KERNEL_KEYS
from lazy_tensor.dispatch.trie import memory_sharing
from lazy_tensor.dispatch.trie.tensor_types import Layout
from lazy_tensor.dispatch.trie.trace import Leaf, Slot, State, Trace, all_traces, alone, local
from lazy_tensor.kernels.disk import Disk
from lazy_tensor.kernels.extension import cpp
from lazy_tensor.kernels.extension.extension import Extension, module_at
from lazy_tensor.kernels.library import loaded

learn: Callable[[Trace, Any, State], None] | None = None
"""Tells the C++ that the call of an op under way led to a state; None while it isn't loaded."""

native: Any = None
"""The C++ itself once it is loaded, for what `replay` asks of it."""

_known: tuple[Any, ...] = ()
_sharded: type[Any] | None = None


def use(
    tensor_class: type[Any],
    mode_class: type[Any],
    close_segment: Callable[[Trace], None],
    at_turn: Callable[[Trace], None],
    share_with_parts: Callable[[list[torch.Tensor]], None],
) -> None:
    """Name the classes whose `__torch_dispatch__` is `record`, what a closed segment needs, a
    loop's turn that ran unrecorded, and the arguments that a sparse result may have as its parts.
    """
    global _known
    classes = (tensor_class, mode_class, Trace, State, Slot, Policy, Leaf, Plan)
    _known = (
        classes, memory_sharing._exposed, memory_sharing._shared, _described, close_segment,
        at_turn, _current, share_with_parts, KERNEL_KEYS,
    )  # fmt: skip


def use_sharded(sharded_class: type[Any]) -> None:
    """Name the class of sharded tensors, whose layouts are part of keys."""
    global _sharded
    _sharded = sharded_class
    if native is not None:
        _listen_to_sharded(native)


def _listen_to_sharded(module: Any) -> None:
    module.use_sharded(_sharded, Layout)
    module.listen("lazy_tensor")


def _current() -> Trace:
    return local.trace


def _start(library: bytes) -> None:
    """Take hits below Python from now on. Called between ops: torch's tables are changed."""
    global learn, native
    native = loaded(library, _started)
    learn = native.learn
    Policy.make_past = native.Past
    Policy.native = native
    for trace in all_traces():
        trace.policy.remember(native.Past())
    end_rests = native.end_rests
    settings.on_change(lambda _: end_rests())


EXTENSION = Extension(
    cpp.HITS.path,
    cpp.HITS.libraries,
    _start,
    waits=True,
)
if settings.records_in_python():
    EXTENSION.status = "LAZY_TENSOR_HITS is python"


def sees_all() -> bool:
    """Whether no mode but ours sees this thread's ops; False too where only C++ could tell."""
    return native is not None and native.sees_all()


def start_if_compiled() -> None:
    """Take hits below Python if what does so is there, and this thread alone has recorded so far.

    torch's tables of kernels are read without a lock, and another thread that records might be
    reading them: a process whose threads all go on recording does so in Python.
    """
    if EXTENSION.is_waiting:
        with alone() as is_alone:
            if is_alone:
                EXTENSION.start_if_compiled()


def start(disk: Disk | None) -> None:
    """Take hits below Python now, compiling what does so if need be; no other thread records."""
    EXTENSION.ask_for(disk, wait=True)
    EXTENSION.start_if_compiled()


def _started(path: str, _: str) -> Any:
    module = module_at("lazy_tensor_hits", path, _)
    module.install(*_known)
    for namespace in ("aten", "profiler"):
        module.listen(namespace)
    composite_overrides.leave_to_cpp()
    module.take_routes()
    if _sharded is not None:
        _listen_to_sharded(module)
    return module


def _described(name: str, overload: str) -> tuple[Any, ...] | None:
    """What `OpInfo` in `native/trie.h` holds of an op; None if it has no Python object."""
    namespace, _, base = name.partition("::")
    packet = getattr(getattr(torch.ops, namespace), base, None)
    op = getattr(packet, overload or "default", None)
    if op is None:
        return None
    facts, rule = facts_of(op), rule_of(op)
    numbers = [
        i
        for i, argument in enumerate(op._schema.arguments)
        if i in facts.number_args or argument.name in facts.number_args
    ]
    return (
        op,
        rule is Rule.ALIAS,
        rule is Rule.DECOMPOSE and not facts.is_out and op not in composite_overrides.IN_PYTHON,
        needs_care(op),
        facts.changes_metadata or facts.is_out,
        facts.writes_list,
        rule in (Rule.RECORD, Rule.DECOMPOSE),
        reads_values(op),
        tuple(numbers),
        rule is Rule.DRAW_INTO,
        input_snapshots.serve_op(facts),
    )
