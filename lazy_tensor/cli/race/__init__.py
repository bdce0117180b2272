"""The demo: programs that run side by side, and the picture of their times."""
