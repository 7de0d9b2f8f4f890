"""headrace's own cache, as the scheduler drives it."""

from __future__ import annotations

from typing import Any

from bench.sides.load import I32, PAGE_TOKENS, Load, serve

from headrace.kvcache.cache import KvCache
from headrace.kvcache.holding import Filled, Holding
from headrace.kvcache.identity import PrefixKey, namespace
from headrace.kvcache.layout import KvLayout, LayerGroup
from headrace.kvcache.pool import Fence


class _Request:
    def __init__(self, root: bytes, ids: I32) -> None:
        self.key = PrefixKey(root, PAGE_TOKENS, ids, len(ids))
        self.holding: Holding | None = None


class Headrace:
    """`KvCache` with a device pool and no other tier."""

    def __init__(self, load: Load) -> None:
        self._layout = KvLayout(PAGE_TOKENS, (LayerGroup("full", 0, (0,), 1, 64, 2),))
        self._cache = KvCache(self._layout, [load.pages])
        self._cache.complete_step(0)  # The one that fills every page: none waits behind a fence.
        self._root = namespace(b"", "", "")

    def request(self, ids: I32) -> _Request:
        return _Request(self._root, ids)

    def hash(self, request: _Request) -> None:
        request.key.page_hashes(request.key.length // PAGE_TOKENS)

    def match(self, request: _Request) -> int:
        request.holding = self._cache.open(request.key, request.key.length)
        return int(request.holding.matched_pages) * PAGE_TOKENS

    def take(self, request: _Request) -> None:
        holding = request.holding
        assert holding is not None
        # The one page that holds the token to compute is not part of the comparison.
        pages = self._cache.take(request.key.length // PAGE_TOKENS - holding.count)
        assert pages is not None, "the pool is too small"
        self._cache.append(holding, pages)

    def publish(self, request: _Request) -> None:
        assert request.holding is not None
        self._cache.publish([Filled(request.holding, request.key, request.key.length - 1, 0)])

    def finish(self, request: _Request) -> None:
        assert request.holding is not None
        self._cache.close([request.holding], Fence())

    def facts(self) -> dict[str, Any]:
        self._cache.check_integrity()
        stats = self._cache.stats()
        return {"version": "this checkout", "pages": stats.indexed, "nodes": stats.nodes}


if __name__ == "__main__":
    serve(Headrace)
