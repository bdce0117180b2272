"""The tree of all programs seen: states, their keys, and why a call was no hit.

Read `trace` first: states, and the path that a thread is on. `keys` says what leads from one state
to the next, `recompile_reason` why nothing did. `tensor_types` is what is known here of lazy
tensors, `liveness` who holds a value, `memory_sharing` who else reaches its memory.
"""
