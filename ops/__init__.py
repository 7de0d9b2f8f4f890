"""What runs in the device worker: kernels, layers, models, weights. Knows nothing of what is above."""
