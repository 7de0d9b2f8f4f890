"""The HTTP server: OpenAI and native APIs, text, the command line. Knows nothing of pages or tensors."""
