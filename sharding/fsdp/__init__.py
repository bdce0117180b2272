"""`fully_shard`: parameters gathered for a layer, gradients reduced."""
