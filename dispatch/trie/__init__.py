"""The tree of all programs seen: states, their keys, and why a call was no hit."""
