"""`replay`: calls that repeat run as their plan, without their Python.

Read `replay` first, then `take` (a call that is recorded) and `captured_call` (one that runs as its
plan). `reach` and `mentions` find what a function can see, `counts` follows its numbers,
`cuda_graph` makes a CUDA graph of a plan. `replay_module` does all that for a module's forward and
backward.
"""
