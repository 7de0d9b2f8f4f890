"""Executors: what the engine speaks to. One client, and devices behind one protocol: a worker process, the oracle."""
