"""Sharded lazy tensors behind the names of `torch.distributed.tensor`. Nothing is exported yet."""
