"""The storage tier: the agent process, what it is told, and the stores behind it."""
