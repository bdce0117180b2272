"""A flush: a plan is found and run, and each value gets its data, or the exception."""
