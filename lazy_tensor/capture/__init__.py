"""`replay`: calls that repeat run as their plan, without their Python."""
