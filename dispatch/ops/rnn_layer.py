"""oneDNN's recurrent layer as an op of ours, which gives what backward needs wherever it runs.

In: the arguments of `aten::mkldnn_rnn_layer`. Out: the same tensors, the workspace among them. The
kernel of the aten op looks at grad mode to know whether that is wanted; a plan may run where grad
mode is another than where the call was made.
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
