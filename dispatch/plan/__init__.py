"""From a recorded trace to the instructions that run it."""
