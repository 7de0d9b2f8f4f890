"""The operations of a GPU's layers, each in one file: what it means in torch, its Triton kernel, and the choice.

Nothing here is imported unless a worker computes on CUDA: triton is an extra.
"""
