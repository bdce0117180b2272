"""The backend that fuses with nvFuser on CUDA.

A segment goes through these modules in order: `backends.lower` makes a graph of simpler aten ops,
`translate` a `definition` by the tables in `pointwise`, `reductions` and `shapes`, `library` an
nvFuser fusion, and `backend` a kernel.
"""
