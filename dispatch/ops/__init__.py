"""Aten ops: facts from their schemas, rules for recording them, and the arguments of one call.

`schema` reads an op's schema, `rules` is the table of what schemas don't say, `request` is one
call. `may_raise` tells plans which ops may raise for their values. `composite_overrides` has ops
that torch decomposes otherwise for lazy tensors, and `rnn_layer` two ops of our own.
"""
