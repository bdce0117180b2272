"""One op on sharded tensors: its decision, its local ops, its collectives."""
