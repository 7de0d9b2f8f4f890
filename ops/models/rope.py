"""Rotary embedding as model files describe it, with the scalings `linear` and `llama3`; other kinds are refused."""

from __future__ import annotations

import math
import struct
from typing import Final

from headrace.ops.models.config import Rope
from headrace.ops.models.keys import Keys, shown
from headrace.ops.weights.gguf import GgufFile

DEFAULT_THETA: Final = 10000.0
FREQUENCIES: Final = "rope_freqs.weight"


def gguf_rope(keys: Keys, file: GgufFile, name: str, rotary_dim: int) -> Rope:
    """Of a GGUF of the architecture `name`: a linear scaling is a key, llama3's a tensor of divisors."""
    theta = keys.positive(f"{name}.rope.freq_base", DEFAULT_THETA)
    prefix = f"{name}.rope.scaling."
    keys.must_be(f"{prefix}type", ("none", "linear"))
    keys.must_be(f"{prefix}attn_factor", (0.0, 1.0))
    # What a model was trained on says nothing about how it is computed.
    for inert in ("original_context_length", "finetuned"):
        keys.get(f"{prefix}{inert}")
    # Without a type a factor counts; 0 says that there is none. Old files have `scale_linear`.
    factor = keys.positive(f"{name}.rope.scale_linear", 1.0)
    if keys.get(f"{prefix}factor") != 0:
        factor = keys.positive(f"{prefix}factor", factor)
    if keys.get(f"{prefix}type") == "none":
        factor = 1.0
    tensor = file.tensors.get(FREQUENCIES)
    if tensor is None:
        return Rope(theta, linear(factor, rotary_dim))
    if tensor.kind != "F32" or tensor.shape != (rotary_dim // 2,) or factor != 1.0:
        raise keys.refused(f"its {FREQUENCIES} is {tensor.kind} of shape {tensor.shape}, beside a factor of {factor:g}")
    divisors = struct.unpack(f"<{rotary_dim // 2}f", file.bytes_of(tensor))
    return Rope(theta, _checked(keys, divisors))


def folder_rope(keys: Keys, rotary_dim: int) -> Rope:
    """Of a folder's config.json: `rope_theta` and `rope_scaling`, or both in `rope_parameters`."""
    refuse_both(keys)
    said = keys.within("rope_scaling" if "rope_scaling" in keys else "rope_parameters")
    theta = said.positive("rope_theta", keys.positive("rope_theta", DEFAULT_THETA))
    # Where both are there, it depends on the reader which of them counts.
    for key in ("rope_theta", "original_max_position_embeddings"):
        if key in said:
            keys.must_be(key, (said.get(key),))
    return scaled_rope(theta, said, rotary_dim)


def scaled_rope(theta: float, scaling: Keys, rotary_dim: int) -> Rope:
    """Raises UnsupportedModel for a kind of scaling that is not implemented."""
    kind = scaling.text("rope_type", scaling.text("type", "default"))
    scaling.must_be("type", (kind,))
    scaling.must_be("partial_rotary_factor", (1, 1.0))
    # What a model was trained on says nothing about how it is computed.
    for inert in ("rope_theta", "original_max_position_embeddings"):
        scaling.get(inert)
    match kind:
        case "default":
            rope = Rope(theta)
        case "linear":
            rope = Rope(theta, linear(scaling.positive("factor"), rotary_dim))
        case "llama3":
            rope = Rope(theta, llama3(theta, scaling, rotary_dim))
        case _:
            raise scaling.refused(f"its rope scaling is {shown(kind)}; linear and llama3 are supported")
    refuse_unread(scaling, f"its rope scaling ({kind})")
    return rope


def refuse_both(keys: Keys) -> None:
    """Raises UnsupportedModel for a config that describes its scaling twice: which counts depends on the reader."""
    if "rope_scaling" in keys and "rope_parameters" in keys:
        raise keys.refused("it has both rope_scaling and rope_parameters", "Take one of them out")


def refuse_unread(keys: Keys, where: str) -> None:
    """Raises UnsupportedModel for a key of an object that nobody has read."""
    for key in keys.unread(""):
        raise keys.refused(f"{where} has the key {shown(key)}, whose effect on the model is not implemented")


def llama3(theta: float, scaling: Keys, rotary_dim: int) -> tuple[float, ...]:
    """Llama 3.1's: slow pairs are divided by the factor, fast ones stay, those between get something between.

    Source: `_compute_llama3_parameters` of transformers' modeling_rope_utils.
    """
    factor, trained = scaling.positive("factor"), scaling.count("original_max_position_embeddings")
    low, high = scaling.positive("low_freq_factor"), scaling.positive("high_freq_factor")
    if low >= high:
        raise scaling.refused(f"low_freq_factor is {low:g}, which is not below high_freq_factor, {high:g}")
    divisors = []
    for pair in range(rotary_dim // 2):
        turns = trained * theta ** (-2 * pair / rotary_dim) / (2 * math.pi)
        # 0 for the slow ones, 1 for the fast.
        share = min(1.0, max(0.0, (turns - low) / (high - low)))
        divisors.append(1 / ((1 - share) / factor + share))
    return tuple(divisors)


def linear(factor: float, rotary_dim: int) -> tuple[float, ...]:
    """Positions are divided by the factor (arXiv:2306.15595)."""
    return () if factor == 1.0 else (factor,) * (rotary_dim // 2)


def _checked(keys: Keys, divisors: tuple[float, ...]) -> tuple[float, ...]:
    if not all(math.isfinite(divisor) and divisor > 0 for divisor in divisors):
        raise keys.refused(f"its {FREQUENCIES} has numbers that are not positive")
    return divisors
