"""One op on sharded tensors: its sharding decision, its local op, its collectives.

Read `calls` first: it records a call. `compute` executes the call by the answer of torch's sharding
rules, which `decisions` keeps. `buckets` joins small collectives, `order` keeps them in the
program's order. `at_once` executes calls while nothing is recorded, `errors` words the errors.
"""
