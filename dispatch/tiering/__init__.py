"""Decides whether a region of the program is recorded or runs as in eager.

Read `policy` first: it decides for one trace. It asks `call_history` whether a sequence of calls
came before (in C++: `native/past.h`), and `sites` which way is faster for the blocks at one place.
"""
