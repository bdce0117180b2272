"""What reaches tensors without an op, and the patches for it."""
