"""CUDA as a worker's device. What gives work to its streams runs on tensors of a CPU too, under streams that are late:
only `streams` and `card` need a card."""
