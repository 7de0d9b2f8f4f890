"""Which page is which: the chain hash of all its tokens and of everything that shapes its bytes.

A *namespace* is the 16-byte hash of weights, layout, adapter and tenant salt; requests share pages only inside one. The
hash of page i is `digest(hash of page i-1 | tokens of page i)`, the namespace standing before page 0, so that equal
hashes mean equal prefixes. A key is hashed once, page by page as it grows (0.08 µs a page of 16 tokens).
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from typing import Final, Literal, TypeAlias

import numpy as np
import xxhash
from numpy.typing import NDArray

PageHash: TypeAlias = Literal["xxh3", "sha256"]
"""xxh3 takes 0.08 µs a page, but collisions can be made by whoever wants to; sha256 (its first 128 bits) takes 0.4, and
is for stores that tenants share who do not trust each other."""


def _sha256(data: bytes) -> bytes:
    return hashlib.sha256(data).digest()[:16]


_DIGESTS: Final[dict[PageHash, Callable[[bytes], bytes]]] = {"xxh3": xxhash.xxh3_128_digest, "sha256": _sha256}


def namespace(
    fingerprint: bytes, adapter: str, salt: str, salt_key: bytes = b"", page_hash: PageHash = "xxh3"
) -> bytes:
    """The 16-byte root of a chain: `fingerprint` covers weights, dtype and layout.

    It is written to storage, so a salt enters it only through a keyed hash: who finds a cache directory can't try salts
    without the key. Fields are length-prefixed, so that no two lists of them run together into the same bytes.
    """
    keyed = hashlib.blake2b(salt.encode(), key=salt_key, digest_size=16).digest() if salt else b""
    parts = (fingerprint, adapter.encode(), keyed, page_hash.encode())
    return _DIGESTS[page_hash](b"".join(len(part).to_bytes(8, "little") + part for part in parts))


class PrefixKey:
    """A request's tokens as the cache sees them: known ids from the root on, and their pages' chain hashes.

    `tokens` is a view of the owner's array and may be bound anew when it moves; ids already hashed never change.
    """

    __slots__ = ("_digest", "_hashes", "length", "namespace", "page_tokens", "tokens")

    def __init__(
        self,
        namespace: bytes,
        page_tokens: int,
        tokens: NDArray[np.int32],
        length: int,
        page_hash: PageHash = "xxh3",
    ) -> None:
        assert len(namespace) == 16 and tokens.dtype == np.int32
        self.namespace = namespace
        self.page_tokens = page_tokens
        self.tokens = tokens
        self.length = length
        self._digest = _DIGESTS[page_hash]
        self._hashes: list[bytes] = []

    def raw(self, first_page: int, end_page: int) -> bytes:
        """Token ids of the pages [first_page, end_page) as little-endian int32 bytes; all must be known."""
        assert end_page * self.page_tokens <= self.length
        return self.tokens[first_page * self.page_tokens : end_page * self.page_tokens].tobytes()

    def page_hashes(self, pages: int, first: int = 0) -> list[bytes]:
        """Chain hashes (16 bytes each) of the first `pages` pages, or of those of them from `first` on."""
        have = len(self._hashes)
        if have < pages:
            assert pages * self.page_tokens <= self.length
            digest = self._digest
            link = self._hashes[-1] if have else self.namespace
            # A void of a page's size becomes bytes: cut by numpy at 0.01 µs a page, a slice of `raw` is 0.05.
            ids = self.tokens[have * self.page_tokens : pages * self.page_tokens].view(f"V{self.page_tokens * 4}")
            self._hashes += [link := digest(link + page) for page in ids.tolist()]
        return self._hashes[first:pages]
