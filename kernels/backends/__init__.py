"""Aten and Inductor: what turns a segment into a kernel."""
