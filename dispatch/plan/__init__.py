"""From a recorded trace to the plan that runs it.

The stages in order: `graph` (dead code, repeats), `foreach`, `remat`, `partition` into segments
(with `dependencies` and `comm_schedule`), `plan` (with `view_offsets`). `interpret` runs a graph
call by call, without a plan. `second_tier` compiles a plan whole once it has run for long.
"""
