"""Loads the C++ in folder `native`, which records hits, and gives it what it needs from Python.

In: classes and functions of this package, named once at import by `use`. Out: calls that are hits
don't come to `record`, and cost about as much as the op's dispatch in eager. One call runs a known
plan. Until it is compiled, or with LAZY_TENSOR_HITS=python, `record` does the same in Python.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from functools import partial
from typing import Any

import torch

from lazy_tensor.dispatch import settings
from lazy_tensor.dispatch.ops import composite_overrides
from lazy_tensor.dispatch.ops.rules import (
    VIEWS_IN_PLACE,
    Rule,
    draws,
    needs_care,
    reads_values,
    rule_of,
)
from lazy_tensor.dispatch.ops.schema import facts_of
from lazy_tensor.dispatch.plan.plan import Plan
from lazy_tensor.dispatch.run import watch
from lazy_tensor.dispatch.stats import NEW, RECORDED, SAYS_SO_AFTER_S, STATS, FlushRecord
from lazy_tensor.dispatch.tiering.policy import Policy
from lazy_tensor.dispatch.tiering.sites import ROUND, ROUND_S
from lazy_tensor.dispatch.torch_private import KERNEL_KEYS, snapshot
from lazy_tensor.dispatch.trie import memory_sharing, tensor_types
from lazy_tensor.dispatch.trie.tensor_types import OWN_ATTRIBUTES, Layout
from lazy_tensor.dispatch.trie.trace import (
    Leaf,
    Slot,
    State,
    Trace,
    all_traces,
    alone,
    local,
    only_one_records,
)
from lazy_tensor.dispatch.user_frame import is_users
from lazy_tensor.kernels.disk import Disk
from lazy_tensor.kernels.extension import cpp
from lazy_tensor.kernels.extension.build_apart import module_at
from lazy_tensor.kernels.extension.extension import Extension
from lazy_tensor.kernels.library import loaded as load_library

learn: Callable[[Trace, Any, State], None] | None = None
"""`learn(trace, op, state)` tells the C++ which state the call under way led to, so that it is a
hit next time. None while hits don't come to C++."""

native: Any = None
"""The C++ module, from when torch's dispatcher calls it for ops; None before."""

loaded: Any = None
"""The same module from when it is loaded, for `replay`: calls may go on coming to Python, because
other threads have recorded (see `start_if_compiled`)."""

_used: dict[str, Any] = {}  # see `use`
_sharded: type[Any] | None = None


def use(**needed: Any) -> None:
    """Give the C++ what it needs from modules that this one may not import. Called at their import.

    The names are those of the C++'s globals, whose comments say what each is for.
    """
    _used.update(needed)


def use_sharded(sharded_class: type[Any]) -> None:
    """Tell the C++ the class of sharded tensors, whose layouts are part of keys."""
    global _sharded
    _sharded = sharded_class
    if loaded is not None:
        loaded.use_sharded(_sharded, Layout)
    if native is not None:
        native.listen("lazy_tensor")


def _current() -> Trace:
    return local.trace


def _may_pass_by() -> bool:
    """Whether ops may pass lazy tensors by (see `PassedBy` in `native/below.h`). Not beside another
    thread that records, nor if writes are watched: nobody would see them."""
    return only_one_records() and not watch.is_on()


def _load(library: bytes) -> None:
    """Load the module, which takes no calls yet: see `_listen`."""
    global loaded
    module = load_library(library, partial(module_at, "lazy_tensor_hits"))
    module.install(_used | {
        "trace_class": Trace, "state_class": State, "slot_class": Slot, "policy_class": Policy,
        "leaf_class": Leaf, "plan_class": Plan,
        "externally_writable": memory_sharing._externally_writable,
        "shared": memory_sharing._shared, "lazy_users": memory_sharing._lazy_users,
        "share": memory_sharing.share, "is_shared": memory_sharing.is_shared,
        "may_pass_by": _may_pass_by, "describe": _described, "current": _current,
        "snapshot": snapshot, "note_writes": watch.note_writes, "is_users_module": is_users,
        "kernel_keys": KERNEL_KEYS, "own_attributes": OWN_ATTRIBUTES,
        "stats": STATS, "blank_record": FlushRecord(thread="", cause="", where=""),
        "recorded": RECORDED, "unknown": NEW, "reads_in_round": ROUND, "round_s": ROUND_S,
        "says_so_after_s": SAYS_SO_AFTER_S,
    })  # fmt: skip
    if _sharded is not None:
        module.use_sharded(_sharded, Layout)
    loaded = module


def _listen() -> None:
    """Register the C++ with torch's dispatcher: from now on ops come to it first.

    Called between ops, by the only thread that records: torch's tables of kernels are changed.
    """
    global learn, native
    for namespace in ("aten", "profiler"):
        loaded.listen(namespace)
    composite_overrides.leave_to_cpp()
    loaded.take_routes()
    if _sharded is not None:
        loaded.listen("lazy_tensor")
    native, learn = loaded, loaded.learn
    tensor_types.cpp = native
    Policy.make_past = native.Past
    Policy.native = native
    # traces made before kept their call history by the Python class, which knows nothing
    for trace in all_traces():
        trace.policy.remember(native.Past())
    # C++ lets blocks at some places pass without Python; other settings may want them recorded
    end_rests = native.end_rests
    settings.on_change(lambda _: end_rests())


EXTENSION = Extension(cpp.HITS, _load, waits=True)


def status() -> str:
    """`Extension.status`, or why ops don't come to the C++ though it is there."""
    if settings.records_in_python():
        return "LAZY_TENSOR_HITS is python"
    if loaded is not None and native is None:
        return "several threads recorded before it was there"
    return EXTENSION.status


def sees_all() -> bool:
    """Whether no dispatch mode but ours sees this thread's ops; False if the C++ isn't in use."""
    return native is not None and native.sees_all()


def start_if_compiled() -> None:
    """Have the C++ take hits if it is compiled and no other living thread has recorded anything.

    torch's tables of kernels are read without a lock, and another thread that records might read
    them while `_listen` changes them. A process with several recording threads stays in Python.
    """
    if native is not None or settings.records_in_python():
        return
    if EXTENSION.is_waiting or loaded is not None:
        with alone() as is_alone:
            if is_alone:
                _start()


def start(disk: Disk | None) -> None:
    """Have the C++ take hits now, and compile it first if need be.

    The caller makes sure that no other thread records.
    """
    if not settings.records_in_python():
        EXTENSION.ask(disk, may_compile=True, wait=True)
        _start()


def ask_for(disk: Disk | None, *, may_compile: bool, wait: bool) -> bool:
    """Load the C++ for `replay`, which doesn't need it to take hits. Returns whether it is loaded.

    The arguments are those of `program.ask_for`.
    """
    if loaded is None:
        EXTENSION.ask(disk, may_compile=may_compile, wait=wait)
        EXTENSION.start_if_compiled()
    return loaded is not None


def _start() -> None:
    EXTENSION.start_if_compiled()
    if loaded is not None and native is None:
        _listen()


def _described(name: str, overload: str) -> tuple[Any, ...] | None:
    """The fields of `OpInfo` in `native/trie.h`, in its order; None for an op without an object in
    `torch.ops`. C++ asks once for each op."""
    namespace, _, base = name.partition("::")
    packet = getattr(getattr(torch.ops, namespace), base, None)
    op = getattr(packet, overload or "default", None)
    if op is None:
        return None
    facts, rule = facts_of(op), rule_of(op)
    return (
        op,
        rule is Rule.ALIAS,
        rule is Rule.DECOMPOSE and not facts.is_out and op not in composite_overrides.IN_PYTHON,
        needs_care(op),
        facts.changes_metadata or facts.is_out,
        facts.writes_list,
        rule in (Rule.RECORD, Rule.DECOMPOSE),
        reads_values(op),
        _numbered(op, facts.number_args),
        rule is Rule.DRAW_INTO,
        draws(op),
        rule is Rule.SAME,
        not facts.is_view,
        VIEWS_IN_PLACE.get(op),
        _numbered(op, facts.writes),
    )


def _numbered(op: Any, arguments: Collection[int | str]) -> tuple[int, ...]:
    """The numbers in the op's schema of `arguments`, which are named by position or by keyword."""
    given = enumerate(op._schema.arguments)
    return tuple([i for i, one in given if i in arguments or one.name in arguments])
