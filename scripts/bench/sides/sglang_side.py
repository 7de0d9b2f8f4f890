"""SGLang's `RadixCache` with its paged allocator, as its scheduler drives them. Runs in an environment of its own."""

from __future__ import annotations

from array import array
from types import SimpleNamespace
from typing import Any

from bench.sides.load import I32, PAGE_TOKENS, Load, serve


class Sglang:
    """Pages of 16 tokens on the CPU; nothing is hashed before a match."""

    def __init__(self, load: Load) -> None:
        import torch

        # The index's torchvision has no operators for a CPU build of torch, and its import wants these declared; the
        # import of SGLang's cache leads there by way of a model's image settings. Nothing calls them.
        if torch.version.cuda is None:
            library: Any = torch.library
            vision = library.Library("torchvision", "DEF")
            for operator in ("nms", "qnms"):
                vision.define(f"{operator}(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
        from sglang.srt.mem_cache.allocator.paged import PagedTokenToKVPoolAllocator
        from sglang.srt.mem_cache.base_prefix_cache import MatchPrefixParams
        from sglang.srt.mem_cache.cache_init_params import CacheInitParams
        from sglang.srt.mem_cache.memory_pool import ReqToTokenPool
        from sglang.srt.mem_cache.radix_cache import RadixCache, RadixKey

        torch.set_num_threads(1)
        self._allocator = PagedTokenToKVPoolAllocator(
            load.pages * PAGE_TOKENS, PAGE_TOKENS, torch.bfloat16, "cpu", None, need_sort=False
        )
        self._rows = ReqToTokenPool(8, load.path_pages * PAGE_TOKENS + 1, "cpu", False)
        self._cache = RadixCache(CacheInitParams(False, self._rows, self._allocator, PAGE_TOKENS))
        self._key, self._params = RadixKey, MatchPrefixParams

    def request(self, ids: I32) -> Any:
        tokens = array("q", ids.tolist())
        kv = SimpleNamespace(req_pool_idx=-1, cache_inserted_len=0, cache_protected_len=0, swa_evict_floor=0)
        return SimpleNamespace(
            full_untruncated_fill_ids=tokens,
            origin_input_ids=tokens,
            extra_key=None,
            cache_salt=None,
            priority=0,
            kv=kv,
            lock=None,
            last_node=None,
            whole=(len(tokens) - 1) // PAGE_TOKENS * PAGE_TOKENS,
        )

    def hash(self, request: Any) -> None:
        pass

    def match(self, request: Any) -> int:
        key = self._key(request.full_untruncated_fill_ids, limit=request.whole)
        result = self._cache.match_prefix(self._params(key=key))
        request.last_node = result.last_device_node
        request.lock = self._cache.lock(result.last_device_node)
        request.matched = self._cache.path_device_indices(result.last_device_node)
        request.kv.cache_protected_len = result.device_prefix_len
        return int(result.device_prefix_len)

    def take(self, request: Any) -> None:
        matched = request.kv.cache_protected_len
        needed = request.whole - matched
        (request.kv.req_pool_idx,) = self._rows.alloc_rows(1)
        self._rows.write((request.kv.req_pool_idx, slice(0, matched)), request.matched.int())
        if needed:
            self._allocator.evict_to_free_tokens(self._cache, needed)
            taken = self._allocator.alloc(needed)
            assert taken is not None, "the pool is too small"
            self._rows.write((request.kv.req_pool_idx, slice(matched, request.whole)), taken.int())

    def publish(self, request: Any) -> None:
        self._cache.checkpoint(request, up_to=request.whole)

    def finish(self, request: Any) -> None:
        self._cache.unlock(request.lock)
        self._rows.free_rows([request.kv.req_pool_idx])

    def facts(self) -> dict[str, Any]:
        from importlib.metadata import version

        nodes, stack = -1, [self._cache.root_node]
        while stack:
            nodes += 1
            stack.extend(stack.pop().children.values())
        pages = self._cache.total_size() // PAGE_TOKENS
        return {"version": version("sglang"), "pages": pages, "nodes": nodes, "without": ["hash"]}


if __name__ == "__main__":
    serve(Sglang)
