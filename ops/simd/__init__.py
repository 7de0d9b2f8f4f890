"""Compiled kernels of a CPU: a small SIMD language on top of numba, and the layers of a model written in it."""
