"""Steps that have everything a request can ask for, before there is any: what they launch is compiled by then.

A kernel takes one to four seconds to compile, once on a machine (triton keeps it); every request beside the first one
with a penalty would wait for that, and the first backup. What is left in tables, pages and sampler state is void: a
request that begins sets its slot anew. No host page is written: those outlive a worker.
"""

from __future__ import annotations

from typing import Final

import numpy as np

from headrace.ops.kv_pool import KvPool
from headrace.ops.runner import Runner
from headrace.ops.wire import INIT_FLOATS, INIT_INTS, MAX_LOGPROBS, Backup, BatchRing, Counts, ForwardBatch

CONTEXT_TOKENS: Final = 4096
"""Long enough that the attention of a short chunk behind it is cut into spans, which are merged."""
_TOKENS: Final = 2
"""Of the chunk."""
_INTS: Final = {"top_k": 5, "min_tokens": 2, "prompt_len": 1, "output_len": 1, "bias_len": 1, "stop_len": 1}
_FLOATS: Final = {"temperature": 0.7, "top_p": 0.9, "min_p": 0.01, "repetition": 1.1, "frequency": 0.1, "presence": 0.1}


def run_first_steps(runner: Runner, pools: list[KvPool], ring: BatchRing, copies: bool) -> None:
    """Two steps, one with log-probabilities. `copies`: there is a host pool; its first page is read, and each group has
    a backup of no page, which launches the kernel of any other."""
    for step, logprobs in enumerate((MAX_LOGPROBS, -1)):
        ring_slot = step % ring.geometry.slots
        batch = _batch(ring, ring_slot, step, pools, logprobs, copies)
        results = ring.results(ring_slot)
        runner.forward(batch, results)
        rows, bits = ring.masks(ring_slot)
        rows[0] = batch.counts.samples - 1
        bits[0] = 0xFFFFFFFF
        sampled = runner.sample(step, rows[:1], bits[:1], results)
        while not sampled.done.query():
            pass
    for group in range(len(pools) if copies else 0):
        backup = runner.back_up(Backup(0, group, [], []))
        while not backup.done.query():
            pass
    for pool in pools:
        pool.table.fill(-1)


def _batch(ring: BatchRing, ring_slot: int, step: int, pools: list[KvPool], logprobs: int, loads: bool) -> ForwardBatch:
    """A row of one token where there are two slots, and a chunk behind a long context; all of it in page 0."""
    slots, pages = pools[0].table.shape
    singles = int(slots > 1)
    context = min(CONTEXT_TOKENS, pages * pools[0].page_tokens)
    chunk = min(_TOKENS, context)
    lengths, contexts = [1] * singles + [chunk], [1] * singles + [context]
    used = [-(-each // pools[0].page_tokens) for each in contexts]
    rows = len(lengths)
    counts = Counts(
        tokens=sum(lengths),
        rows=rows,
        decode_rows=sum(length == 1 for length in lengths),
        samples=rows,
        table_edits=len(pools) * sum(used),
        slot_inits=rows,
        init_ids=4 * rows,
        init_biases=rows,
        wants=min(1, ring.geometry.max_wants),
        loads=len(pools) * int(loads),
    )
    batch = ring.write(ring_slot, step, counts)
    batch.input_ids[:] = 0
    batch.row_slot[:] = batch.sample_row[:] = batch.init_slot[:] = np.arange(rows)
    batch.row_start[:] = np.cumsum([0, *lengths])
    batch.row_kv_len[:] = contexts
    batch.positions[:] = [at for length, end in zip(lengths, contexts) for at in range(end - length, end)]
    batch.sample_position[:] = 0
    places = [(group, slot, page) for group in range(len(pools)) for slot in range(rows) for page in range(used[slot])]
    batch.edit_group[:], batch.edit_slot[:], batch.edit_index[:] = np.array(places, np.int32).T
    batch.edit_page[:] = 0
    batch.init_ints[:] = [{**_INTS, "logprobs": logprobs}.get(name, 0) for name in INIT_INTS]
    batch.init_floats[:] = [_FLOATS[name] for name in INIT_FLOATS]
    for field in (batch.init_ids, batch.init_biases, batch.want_token, batch.want_target):
        field[:] = 0
    batch.load_group[:] = np.arange(len(batch.load_group))
    batch.load_host[:] = batch.load_device[:] = 0
    return batch
