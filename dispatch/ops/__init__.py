"""Aten ops: their schemas, what may be recorded of them, one call of one."""
