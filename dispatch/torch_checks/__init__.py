"""Checks, once at import, what the package relies on in Python and torch.

`assumptions` has the checks of Python and runs all of them. `names` lists torch's private names,
which must exist. `behavior` tries what they do.
"""
