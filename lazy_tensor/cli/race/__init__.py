"""The demo: programs that run side by side, and the picture of their times.

`scenes` has the programs, `turn` runs one side, `screen` shows the table, `plot` draws the picture.
"""
