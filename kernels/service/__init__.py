"""The compile service: what is built, when, by whom, and whether it is used.

Read `compile` first, then `fusion`: a segment, and what runs it now. `jobs` and `workers` (each a
`worker`) build, `families` lets sizes share a kernel. `trial` and `verify` compare a kernel with
ops one by one; `progress`, `repro` and `fork` are for what is shown, kept, or forked.
"""
