"""Python numbers that are others in each call of a function that `replay` runs.

`step_counts` follows those of optimizers, `schedulers` repeats what sets their rates.
`call_numbers` tells what a call does with numbers that it reads from tensors, or finds where
`kept_numbers` lends them. `op_numbers` computes all that ops get.
"""
