"""What reaches tensors without an op, and the patches for it.

`patch_table` lists each with its reason; `torch_ways` names them, `wrappers` has what stands there
instead. `held` finds lazy tensors that functions hold; `leaving` sees to the end of a process.
"""
