"""Shapes, strides and dtypes of what an op gives, without running it."""
