"""The trie of all programs seen: states, the keys that lead between them, and what a trace needs.

Read `trace` first: it has the states, and the path that each thread is on. `keys` makes the key of
a call, `recompile_reason` says why no state had it. `tensor_types` is what is known here of lazy
tensors. `liveness` tells which values somebody holds, `memory_sharing` who else reaches a tensor's
memory.
"""
