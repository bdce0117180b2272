"""Tells which ops end a segment: the trace is handed to the device once such an op is recorded.

In: the node of a new state. Out: what `State.closes` says, for this call and all its hits. The
device works while the rest of the program is recorded. Called by `extend_trie`.
"""

from __future__ import annotations

from lazy_tensor.dispatch import settings
from lazy_tensor.dispatch.run.compile_service import chosen_backend
from lazy_tensor.dispatch.trie.trace import Node, is_apart

DIRECT = "collectives that nobody sees"
"""The name that is set apart (`trace.set_apart`) while something communicates below Python.

Nobody sees those collectives, so recorded ones are issued at once and none changes its place.
"""
HANDS_OVER_FROM_OPS = 512
"""Recorded ops after which a device other than the CPU gets the trace at the next segment's end.

The device waits for at most so many ops to be recorded, 1 to 2 ms. Each flush costs the host: with
64 ops a training step took the host 2.6 times eager's time, with 512 ops 1.8 times
(`benches/bench_nvfuser_host.py`).
"""


def closes_segment(node: Node, n_ops: int) -> bool:
    """Whether the trace is flushed once `node`, its op number `n_ops`, is recorded.

    The option `flush_policy` decides, but for collectives that must be issued at once.
    """
    if node.issues and is_apart(DIRECT):
        return True
    policy = settings.current().flush_policy
    if policy == "at_materialization" or node.view_of is not None:
        return False
    device = "cpu"
    for spec in node.specs:
        if spec is not None:
            device = spec.device.type
            break
    if policy == "auto" and (device == "cpu" or n_ops < HANDS_OVER_FROM_OPS):
        return False
    # an op that the device's backend can't fuse ends a segment
    return chosen_backend(device).refuses(node.call) is not None
