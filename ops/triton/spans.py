"""How decode attention cuts contexts (`decode_attention`): what a server knows of it, to plan memory. No torch here."""

from __future__ import annotations

from typing import Final

SPAN_TOKENS: Final = 512
"""256 KB of KV at 128 dimensions, 8 µs of one SM's share of the bandwidth; the mixtures are 1 % of that."""
MOST_SPANS: Final = 64
"""Of a row: spans of contexts over 32k tokens are longer. With 8 KV heads one row is still work for 512 programs; its
mixtures take 1 MB at 32 heads of 128, those of 256 rows 256 MiB, however long their contexts are."""


def max_spans(context_tokens: int, span_tokens: int = SPAN_TOKENS, window: int = 0, most: int = MOST_SPANS) -> int:
    """The most pieces that one row of at most so many tokens is cut into."""
    seen = min(context_tokens, window + span_tokens) if window else context_tokens
    # A window may begin and end inside a span.
    return min(-(-seen // span_tokens), most + bool(window))
