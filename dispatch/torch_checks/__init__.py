"""What the package relies on in Python and torch, checked once at import.

`assumptions` asks whether all of `names` are there, and whether they do what `behavior` tries.
"""
