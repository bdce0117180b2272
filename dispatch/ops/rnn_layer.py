"""oneDNN's recurrent layer as an op of our own, which always gives the workspace for backward.

In: the arguments of `aten::mkldnn_rnn_layer`. Out: its results. The aten op's kernel fills the
workspace only if grad mode is on when it runs. A plan may run in another grad mode than the call
was made in. So `op_handlers` records this op instead, which turns grad mode on.
"""

from __future__ import annotations

from typing import Any

import torch

aten = torch.ops.aten
LIBRARY = torch.library.Library("lazy_tensor", "FRAGMENT")
LIBRARY.define(
    str(aten.mkldnn_rnn_layer.default._schema).replace("aten::mkldnn_rnn_layer", "rnn_layer")
)


@torch.enable_grad()
def _run(*args: Any) -> Any:
    return aten.mkldnn_rnn_layer.default(*args)


LIBRARY.impl("rnn_layer", _run, "CPU")
WITH_WORKSPACE = torch.ops.lazy_tensor.rnn_layer.default
