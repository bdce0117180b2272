"""oneDNN's recurrent layer as two ops of our own: for training, and for inference.

In: the arguments of `aten::mkldnn_rnn_layer`. Out: its results. The aten op's kernel looks at the
grad mode that is on when it runs: by it, it fills the workspace for backward, and may round
otherwise. A plan may run in another grad mode than the call was made in. So `op_handlers` records
one of these ops instead, each of which puts its own grad mode in force.
"""

from __future__ import annotations

from typing import Any

import torch
from torch._ops import OpOverload

aten = torch.ops.aten
LIBRARY = torch.library.Library("lazy_tensor", "FRAGMENT")


def _op(name: str, *, trains: bool) -> OpOverload:
    """The layer as an op `lazy_tensor::<name>`, which runs with grad mode on or off."""

    def run(*args: Any) -> Any:
        with torch.set_grad_enabled(trains):
            return aten.mkldnn_rnn_layer.default(*args)

    schema = str(aten.mkldnn_rnn_layer.default._schema)
    LIBRARY.define(schema.replace("aten::mkldnn_rnn_layer", name))
    LIBRARY.impl(name, run, "CPU")
    made: OpOverload = getattr(torch.ops.lazy_tensor, name).default
    return made


TRAINING = _op("rnn_layer", trains=True)
INFERENCE = _op("rnn_layer_inference", trains=False)
