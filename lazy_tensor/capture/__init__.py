"""`replay`: repeated calls of a function run as a plan, without the function's Python.

Read `replay` first, then `take` (records one call) and `captured_call` (runs such a call as its
plan). `reach` and `mentions` find the Python objects that a function can see. `counts` recomputes
the numbers that optimizers make from step counts and rates. `cuda_graph` makes a CUDA graph of a
plan. `replay_module` applies all this to a module's forward and backward.
"""
