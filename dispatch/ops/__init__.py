"""Aten ops: their schemas, what may be recorded of them, one call of one.

`schema` has what a schema says, `rules` what it can't say, `request` one call. `may_raise` and
`composite_overrides` are tables for plans and for ops that torch takes apart.
"""
