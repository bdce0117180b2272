"""One op on sharded tensors: its sharding decision, its local op, its collectives.

Read `calls` first: it records a call. `compute` executes the call by the answer of torch's sharding
rules, which `decisions` keeps. `buckets` joins small collectives, `order` keeps them in the
program's order. While nothing is recorded, C++ runs the calls that `at_once` has told it. `errors`
words the errors.
"""
