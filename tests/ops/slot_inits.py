"""What a request asks of the sampler, written into a batch as a server would."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from headrace.ops.wire import INIT_FLOATS, INIT_INTS, ForwardBatch


class SlotInit(msgspec.Struct, frozen=True):
    """A request that begins in a slot; the defaults are greedy, and everything else is off."""

    slot: int
    prompt: Sequence[int] = ()
    outputs: Sequence[int] = ()
    bias: dict[int, float] = {}
    stops: Sequence[int] = ()
    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    seed: int = 0
    repetition: float = 1.0
    frequency: float = 0.0
    presence: float = 0.0
    min_tokens: int = 0
    logprobs: int = -1

    @property
    def ids(self) -> list[int]:
        return [*self.prompt, *self.outputs, *self.bias, *self.stops]


def init_counts(inits: Sequence[SlotInit]) -> dict[str, int]:
    """The part of `Counts` that slot inits make up."""
    return {
        "slot_inits": len(inits),
        "init_ids": sum(len(init.ids) for init in inits),
        "init_biases": sum(len(init.bias) for init in inits),
    }


def write_inits(batch: ForwardBatch, inits: Sequence[SlotInit]) -> None:
    """Fill the batch's init fields."""
    batch.init_slot[:] = [init.slot for init in inits]
    for row, init in enumerate(inits):
        seed = init.seed & 0xFFFFFFFFFFFFFFFF
        ints = {
            "top_k": init.top_k,
            "seed_low": _signed(seed & 0xFFFFFFFF),
            "seed_high": _signed(seed >> 32),
            "min_tokens": init.min_tokens,
            "logprobs": init.logprobs,
            "prompt_len": len(init.prompt),
            "output_len": len(init.outputs),
            "bias_len": len(init.bias),
            "stop_len": len(init.stops),
        }
        batch.init_ints[row] = [ints[name] for name in INIT_INTS]
        batch.init_floats[row] = [getattr(init, name) for name in INIT_FLOATS]
    batch.init_ids[:] = [token for init in inits for token in init.ids]
    batch.init_biases[:] = [value for init in inits for value in init.bias.values()]


def _signed(word: int) -> int:
    return word - (1 << 32) if word >> 31 else word
