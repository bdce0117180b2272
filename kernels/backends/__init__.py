"""The backends `aten`, `inductor` and `whole`, which turn segments into kernels.

`aten` runs ops one by one. `inductor` traces a segment to a graph of simpler ops (`lower`), has
Inductor compile it (`torch_inductor`), and packs the result into bytes (`artifact`). `index_checks`
makes indices from data safe. `whole` compiles a whole plan with Inductor.
"""
