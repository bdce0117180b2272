"""`replay`: repeated calls of a function run as a plan, without the function's Python.

Read `replay` first, then `take` (records one call), `outline` (what it did) and `captured_call`
(runs such a call as its plan). `object_graph`, `watched_object` and `mentions` find and watch the
Python objects that a function can see, `arguments` reads those that it is given. `numbers` computes
the numbers that are others in each call, `sizes` makes one plan for calls of many sizes.
`cuda_graph` makes a CUDA graph of a plan. `replay_module` applies all this to a module's forward
and backward.
"""
