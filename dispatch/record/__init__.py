"""One op that is no hit: its inputs, its state in the trie, or its run at once.

Read `recorder` first. `op_handlers` does what rules ask for; `moving_index` and `memory_overlap`
are two more reasons to do something else. `inputs` lets tensors in, `extend_trie` adds the state,
`segment_end` says whether it ends a segment. `eager_fallback` runs what isn't recorded;
`sync_points` ends a region.
"""
