"""The backend that fuses with nvFuser on CUDA.

A segment goes through these modules in order. `backends.lower` makes a graph of simpler aten ops.
`translate` makes a `definition` of the graph, by the rules in `pointwise`, `reductions` and
`shapes`. `library` makes an nvFuser fusion of the definition, and `backend` a kernel of the fusion.
"""
