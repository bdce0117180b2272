"""Aten and Inductor: what turns a segment into a kernel.

`aten` runs ops one by one. `inductor` has a segment made simpler by `lower` and compiled by
`torch_inductor`, to an `artifact` that can be kept; `index_checks` sees to indices out of range.
"""
