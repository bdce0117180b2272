"""What the package relies on in Python and torch, checked once at import."""
