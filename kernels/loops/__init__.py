"""Kernels of simple segments, as plain loops in C++ that this package writes itself.

The text includes no header and needs nothing of Inductor, so a kernel is there in a tenth of a
second; Inductor's first one takes seven seconds or more. Whatever isn't simple is Inductor's.

`read` gives the results of a segment as `values`, functions of an `index`: `rules`, `reductions`
and `views` tell what each op does, by means of `builder`. `write` sorts the values into nests of
loops, `nest` and `body` write these, and `cpp` compiles the text.
"""
