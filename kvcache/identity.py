"""Which page is which: the chain hash of all its tokens and of everything that shapes its bytes.

A *namespace* is the 16-byte hash of weights, layout, adapter and tenant salt; requests share pages only inside one. The
hash of page i is `xxh3_128(hash of page i-1 | tokens of page i)`, the namespace standing before page 0, so that equal
hashes mean equal prefixes. A key is hashed once, page by page as it grows (0.2 µs a page of 16 tokens).
"""

from __future__ import annotations

import numpy as np
import xxhash
from numpy.typing import NDArray


def namespace(fingerprint: bytes, adapter: str, salt: str) -> bytes:
    """The 16-byte root of a chain: `fingerprint` covers weights, dtype and layout. Fields are length-prefixed, so that
    no two triples run together into the same bytes."""
    parts = (fingerprint, adapter.encode(), salt.encode())
    return xxhash.xxh3_128_digest(b"".join(len(part).to_bytes(8, "little") + part for part in parts))


class PrefixKey:
    """A request's tokens as the cache sees them: known ids from the root on, and their pages' chain hashes.

    `tokens` is a view of the owner's array and may be bound anew when it moves; ids already hashed never change.
    """

    __slots__ = ("_hashes", "length", "namespace", "page_tokens", "tokens")

    def __init__(self, namespace: bytes, page_tokens: int, tokens: NDArray[np.int32], length: int) -> None:
        assert len(namespace) == 16 and tokens.dtype == np.int32
        self.namespace = namespace
        self.page_tokens = page_tokens
        self.tokens = tokens
        self.length = length
        self._hashes: list[bytes] = []

    def raw(self, first_page: int, end_page: int) -> bytes:
        """Token ids of the pages [first_page, end_page) as little-endian int32 bytes; all must be known."""
        assert end_page * self.page_tokens <= self.length
        return self.tokens[first_page * self.page_tokens : end_page * self.page_tokens].tobytes()

    def page_hashes(self, pages: int) -> list[bytes]:
        """Chain hashes (16 bytes each) of the first `pages` pages."""
        have = len(self._hashes)
        if have < pages:
            raw = self.raw(have, pages)
            step = self.page_tokens * 4
            link = self._hashes[-1] if have else self.namespace
            for at in range(0, len(raw), step):
                link = xxhash.xxh3_128_digest(link + raw[at : at + step])
                self._hashes.append(link)
        return self._hashes[:pages]
