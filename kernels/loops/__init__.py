"""Kernels of simple segments, as plain loops in C++ that this package writes itself.

A kernel is ready in a tenth of a second, because its text includes no header and needs nothing of
Inductor, whose first kernel takes seven seconds or more. Segments that aren't simple are left to
Inductor.

`read` turns a segment into `values`: functions of an `index`. `rules`, `reductions` and `views`
say what each op computes, and make values with a `builder`. `write` sorts the values into loop
nests. `nest` and `body` write the text of a nest, and `cpp` compiles the whole.
"""
