"""Calls of one function that differ in the sizes of their tensors, run by one plan.

`size_texts` tells how sizes follow from those of the tensors that a call reads. `any_size` compares
calls of several sizes, and makes of them what `captured_call` needs for all sizes.
"""
