"""What `explain()` shows: flushes with their segments, reasons for misses, and advice.

`flushes` makes plain data of the flush log, `advice` the sentences on what would help. `text`,
`page` and `lanes` show both. Read `flushes` first.
"""
