"""From a recorded trace to the instructions that run it.

In this order: `graph`, `foreach`, `remat`, `partition` (with `dependencies` and `comm_schedule`),
`plan` (with `view_offsets`). `interpret` runs a graph without a plan, call by call.
"""
