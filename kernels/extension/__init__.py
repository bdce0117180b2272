"""C++ that is compiled with the package or in the background: pool, programs, recorder.

`cpp` names the sources, `extension` loads one from disk or compiles it, in a process of its own by
`build_apart`. `program` runs lists of instructions, `pool` keeps memory.
"""
