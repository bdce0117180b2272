"""What `explain()` shows: flushes looked at, misses explained, advice, as text and as a page."""
