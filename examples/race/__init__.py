"""The demo's parts: programs that run one side after another, and the picture of their times.

`scenes` has the programs, `turn` runs one side, `screen` shows the table, `plot` draws the picture.
`__main__` calls them; benchmarks use `scenes` too.
"""
