"""The KV cache: page pools, the radix index, tiers. Knows nothing of models, text, HTTP or torch."""
