"""Whether a region of the program is recorded or runs as in eager."""
