"""Shapes, strides and dtypes of what an op gives, without running it.

`shape_formulas` has most ops, with the tables `view_formulas` and `other_formulas`; `infer` asks
torch for the rest. `kernel_probe` asks kernels where torch's answer is not to be trusted, on inputs
that `shrunk` makes small.
"""
