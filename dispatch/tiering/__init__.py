"""Whether a region of the program is recorded or runs as in eager.

`call_history` knows which calls came before (in C++: `native/past.h`), `policy` decides for a
trace, `sites` for the blocks at one place of the program.
"""
