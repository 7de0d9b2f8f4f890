"""What `scripts/bench/index.py` compares: one load, and one process a side that carries it out with its own code."""
