"""How KV is laid out: groups of layers that share a page table, and the bytes of one page in each tier.

A page holds `page_tokens` consecutive positions of every layer of its group. A hybrid layout has full groups, whose
pages a prefix needs all, and after them window groups, of which it needs only those that the next token looks at.
"""

from __future__ import annotations

from typing import Final, Literal

import msgspec

HOST_SLOT_ALIGNMENT: Final = 4096
"""A host page starts on a multiple of this, so that O_DIRECT can read and write it in place."""


class LayerGroup(msgspec.Struct, frozen=True):
    """Layers with the same attention span."""

    kind: Literal["full", "window"]
    window_tokens: int
    """Of a window group: how many positions up to its own a token may look at; 0 for a full group."""
    layers: tuple[int, ...]
    kv_heads: int
    head_dim: int
    value_bytes: int
    """Of one K or V value: 4 for float32, 2 for bfloat16."""

    @property
    def token_bytes(self) -> int:
        """KV of one token in all layers of the group: layers x {K, V} x heads x dim."""
        return len(self.layers) * 2 * self.kv_heads * self.head_dim * self.value_bytes

    def first_page(self, position: int, page_tokens: int) -> int:
        """The first page that a token at `position` may look at."""
        return max(0, position + 1 - self.window_tokens) // page_tokens if self.window_tokens else 0

    def running_pages(self, page_tokens: int) -> int:
        """Pages of a window group with which a request always gets on: its window, wherever that begins in a page, one
        token more for a row that is repeated, and the page that it fills."""
        return -(-self.window_tokens // page_tokens) + 2


class KvLayout(msgspec.Struct, frozen=True):
    """The whole model's KV."""

    page_tokens: int
    groups: tuple[LayerGroup, ...]
    """Full groups, of which there is one at least; then window groups."""

    @property
    def full_groups(self) -> int:
        """How many there are: the first ones."""
        return sum(group.kind == "full" for group in self.groups)

    @property
    def is_hybrid(self) -> bool:
        """Whether there are window groups."""
        return self.groups[-1].kind == "window"

    def page_bytes(self, group: int) -> int:
        """Bytes of one page of a group."""
        return self.page_tokens * self.groups[group].token_bytes

    def host_slot_bytes(self, group: int) -> int:
        """Stride of a page in the host pool and in storage."""
        size = self.page_bytes(group)
        return (size + HOST_SLOT_ALIGNMENT - 1) // HOST_SLOT_ALIGNMENT * HOST_SLOT_ALIGNMENT

    def pages(self, tokens: int) -> int:
        """Pages that hold this many tokens."""
        return -(-tokens // self.page_tokens)

    def fingerprint(self) -> bytes:
        """Bytes that differ whenever a page's layout does; part of every page's identity."""
        return msgspec.msgpack.encode(self)
