"""The scheduler: requests, batches, policies, stages, executors. Knows nothing of HTTP, text or torch."""
