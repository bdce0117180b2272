"""The command line, `python -m lazy_tensor`: a user of the package that nothing in it imports."""
