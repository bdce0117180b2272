"""`fully_shard`: parameters gathered for a layer, gradients reduced.

`groups` says when, `gathering` records it, `states` saves and loads. `torch_private` has torch's
private names.
"""
