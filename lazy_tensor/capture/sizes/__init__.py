"""Calls of one function that differ in the sizes of their tensors, run by one plan.

`kin` knows which calls these are. `merged_steps` finds what they have in common, `size_texts` how
their sizes follow from a few, and `size_conditions` which sizes make torch do the same. `any_size`
makes of that what `captured_call` needs; `sized_draw` draws random numbers for all sizes.
"""
