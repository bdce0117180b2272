"""Functions that reach a tensor's memory, class or dispatch without an aten op, and their patches.

`torch_ways` names the functions, `wrappers` has the treatments that stand in their place, and
`patch_table` joins the two and gives each a reason: read it first. `held` finds lazy tensors in
closures and attributes. `leaving` waits for torch's threads at the end of a process.
"""
