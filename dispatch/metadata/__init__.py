"""Shapes, strides and dtypes of an op's outputs, without running the op.

`shape_formulas` computes them for most ops, with the tables of `view_formulas` and
`other_formulas`. `infer` asks torch's meta functions for the rest. `kernel_probe` corrects those
answers by running kernels on tiny tensors, whose sizes `shrunk` chooses.
"""
