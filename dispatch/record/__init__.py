"""Records one op that is no hit in C++: its inputs enter the trace, and the trie gets a state.

Read `recorder` first. `inputs` makes tensors leaves of the trace, `extend_trie` adds the state, and
`segment_end` says whether that state ends a segment. `op_handlers` has the ops that need more than
recording, with `samples` for random ones. `moving_index` and `memory_overlap` find two kinds of
calls that run at once. `eager_fallback` runs every such call, and `sync_points` ends regions.
"""
