"""headrace: an asyncio-native LLM server for one node, made for long, shared contexts."""

__version__ = "0.1.0"
