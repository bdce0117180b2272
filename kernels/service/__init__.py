"""The compile service: builds kernels in the background, and decides whether they are used.

Read `compile` first, then `fusion`: a segment and the callable that runs it now. `jobs` is the
queue of builds, `workers` the parent's side of the processes that run `worker`. `families` lets
segments of different sizes share a kernel. `trial` times a kernel against op-by-op execution, and
`verify` compares their results. `repro` writes a script that shows a wrong result.
"""
