"""A flush: find the plan of a trace, run it, and give each value its data, or the exception.

Read `flush` first. `plan_cache` looks plans up and builds them; `compile_service` obtains kernels
and the package's C++; `failure` computes what it can after an exception. `watch` tells whether a
value was written, `input_snapshots` copies memory that others may write. `tape` records what
`replay` needs, `profiling` and `debug_view` serve profilers and debuggers. `aside` computes one
value without a flush. `hits` loads the C++ that records hits.
"""
