"""One op on sharded tensors: its decision, its local ops, its collectives.

Read `calls` first: a call that is recorded. `compute` runs it, by what torch said (`decisions`),
with `buckets` and `order` for its collectives. `at_once` is a call that is not recorded, `errors`
words what is wrong.
"""
