"""Kernels of simple segments, as plain loops in C++ that this package writes itself.

The text includes no header and needs nothing of Inductor, so a kernel is there in a fraction of a
second; Inductor's first one takes seven seconds or more. Whatever isn't simple is Inductor's.
"""
