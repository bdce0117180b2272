"""Recording a hit below Python: the C++ in folder `native`, and what it must know of this package.

In: what `record` does for calls seen before. Out: such calls no longer reach `record`, and cost
about what the op's dispatch costs in eager; a known plan is run by one call. Without a C++ compiler
all goes on in Python.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
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
from lazy_tensor.kernels.library import loaded as load_library

learn: Callable[[Trace, Any, State], None] | None = None
"""Tells the C++ that the call of an op under way led to a state; None while it isn't loaded."""

native: Any = None
"""The C++ itself once calls come to it."""

loaded: Any = None
"""The same from when it is loaded, by which time calls may go on coming to Python: for `replay`."""

_known: tuple[Any, ...] = ()
_of_replay: tuple[Any, ...] = ()
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
        classes, memory_sharing._externally_writable, memory_sharing._shared, _described,
        close_segment, at_turn, _current, share_with_parts, KERNEL_KEYS,
    )  # fmt: skip


def use_replay(
    changed: type[Exception], missing: Any, any_tensor: Any, atoms: frozenset[type]
) -> None:
    """Name the exception that says what changed since a call was captured, what stands for nothing
    and for any tensor in what is expected of an object, and the types that are compared by value.
    """
    global _of_replay
    _of_replay = (changed, missing, any_tensor, atoms)


def use_sharded(sharded_class: type[Any]) -> None:
    """Name the class of sharded tensors, whose layouts are part of keys."""
    global _sharded
    _sharded = sharded_class
    if loaded is not None:
        loaded.use_sharded(_sharded, Layout)
    if native is not None:
        native.listen("lazy_tensor")


def _current() -> Trace:
    return local.trace


def _load(library: bytes) -> None:
    global loaded
    module = load_library(library, partial(module_at, "lazy_tensor_hits"))
    module.install(*_known)
    module.use_replay(*_of_replay)
    if _sharded is not None:
        module.use_sharded(_sharded, Layout)
    loaded = module


def _listen() -> None:
    """Take hits below Python from now on. Called between ops: torch's tables are changed."""
    global learn, native
    for namespace in ("aten", "profiler"):
        loaded.listen(namespace)
    composite_overrides.leave_to_cpp()
    loaded.take_routes()
    if _sharded is not None:
        loaded.listen("lazy_tensor")
    native, learn = loaded, loaded.learn
    Policy.make_past = native.Past
    Policy.native = native
    for trace in all_traces():
        trace.policy.remember(native.Past())
    end_rests = native.end_rests
    settings.on_change(lambda _: end_rests())


EXTENSION = Extension(cpp.HITS.path, cpp.HITS.libraries, _load, waits=True)


def status() -> str:
    """As `Extension.status`, or why calls don't come to it."""
    if settings.records_in_python():
        return "LAZY_TENSOR_HITS is python"
    if loaded is not None and native is None:
        return "several threads recorded before it was there"
    return EXTENSION.status


def sees_all() -> bool:
    """Whether no mode but ours sees this thread's ops; False too where only C++ could tell."""
    return native is not None and native.sees_all()


def start_if_compiled() -> None:
    """Take hits below Python if what does so is there, and this thread alone has recorded so far.

    torch's tables of kernels are read without a lock, and another thread that records might be
    reading them: a process whose threads all go on recording does so in Python.
    """
    if native is not None or settings.records_in_python():
        return
    if EXTENSION.is_waiting or loaded is not None:
        with alone() as is_alone:
            if is_alone:
                _start()


def start(disk: Disk | None) -> None:
    """Take hits below Python now, compiling what does so if need be; no other thread records."""
    if not settings.records_in_python():
        EXTENSION.ask_for(disk, wait=True)
        _start()


def ask_for(disk: Disk | None, *, may_compile: bool, wait: bool) -> bool:
    """Load the C++, for what asks it for other things than to take hits; whether it is there. As
    `program.ask_for` otherwise."""
    if loaded is None:
        EXTENSION.ask(disk, may_compile=may_compile, wait=wait)
        EXTENSION.start_if_compiled()
    return loaded is not None


def _start() -> None:
    EXTENSION.start_if_compiled()
    if loaded is not None and native is None:
        _listen()


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
