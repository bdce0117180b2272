"""The package's C++, compiled at installation or in the background: programs, recorder.

`cpp` names the sources. `extension` loads one from disk, or has `build_apart` compile it in a
process of its own. `program` runs lists of instructions; its `pool` keeps freed memory. The
recorder's sources are in `dispatch/native`; `dispatch.run.hits` loads it.
"""
