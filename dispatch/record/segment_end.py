"""Which ops end a segment, so that the trace is handed to the device as soon as one is recorded."""

from __future__ import annotations

from lazy_tensor.dispatch import settings
from lazy_tensor.dispatch.run.compile_service import chosen_backend
from lazy_tensor.dispatch.trie.trace import Node, is_apart
from lazy_tensor.kernels.segment import Call

DIRECT = "collectives that nobody sees"
"""In force while something communicates below Python: collectives are then issued at once."""
HANDS_OVER_FROM_OPS = 512
"""Recorded ops from which a device other than the CPU is given them at the next op that ends a
segment: it waits for no more than these to be recorded, 1 to 2 ms. Each flush costs the host: from
64 ops on, a training step took it 2.6 times eager's time, from 512 on 1.8
(`benches/bench_nvfuser_host.py`)."""


def closes_segment(node: Node, n_ops: int) -> bool:
    """Whether recording `node`, with which the trace has `n_ops`, hands it to the device at once
    (see `flush_policy`)."""
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
    call = Call(node.facts.op, node.args, node.kwargs, node.specs)
    return chosen_backend(device).refuses(call) is not None
