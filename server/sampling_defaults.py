"""What a request gets where it says nothing of sampling: OpenAI's defaults, or those that the model's makers chose.

Makers write them into generation_config.json, from where converters take them into a GGUF's `general.sampling` keys.
"""

from __future__ import annotations

import math
from pathlib import Path
from typing import Final

import msgspec

from headrace.ops.models.keys import UnsupportedModel, shown
from headrace.ops.weights.files import ModelFile
from headrace.ops.weights.gguf import GgufFile
from headrace.server.config import SamplingSource
from headrace.server.folder_text import GENERATION, read_small
from headrace.server.openai_requests import SamplingFields

LEAST_SINGLE: Final = 2.0**-126
"""The least float32 of full precision."""


class SamplingDefaults(msgspec.Struct, frozen=True, kw_only=True):
    """As in a request; without an argument, OpenAI's: nothing but the model's own distribution."""

    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    """0 is off."""
    min_p: float = 0.0
    repetition_penalty: float = 1.0


_GGUF_KEYS: Final = {
    "temperature": "general.sampling.temp",
    "top_p": "general.sampling.top_p",
    "top_k": "general.sampling.top_k",
    "min_p": "general.sampling.min_p",
    "repetition_penalty": "general.sampling.penalty_repeat",
}


def sampling_defaults(file: ModelFile, source: SamplingSource) -> SamplingDefaults:
    """Raises UnsupportedModel where the model says what no request may, BadModelFile."""
    if source == "openai":
        return SamplingDefaults()
    if isinstance(file, GgufFile):
        path, values = file.path, {name: file.metadata.get(key) for name, key in _GGUF_KEYS.items()}
    else:
        path = str(Path(file.path) / GENERATION)
        config = read_small(Path(path))
        values = {name: config.get(name) for name in _GGUF_KEYS}
    said = {name: value for name, value in values.items() if value is not None}
    for name, value in said.items():
        _check(path, name, value)
    if said.get("top_k") == -1:
        said["top_k"] = 0
    return msgspec.convert(said, SamplingDefaults)


def is_nearly_zero(value: float) -> bool:
    """Whether single precision, in which the model computes, would take it for another number."""
    return 0 < abs(value) < LEAST_SINGLE


def _check(path: str, name: str, value: object) -> None:
    """Raises UnsupportedModel for a value that no request may have."""
    try:
        msgspec.convert({name: value}, SamplingFields)
        is_sound = not isinstance(value, float) or (math.isfinite(value) and not is_nearly_zero(value))
        reason = "" if is_sound else "it must be 0, or a number that single precision has"
    except msgspec.ValidationError as error:
        reason = str(error).partition(" - at ")[0]
    if reason:
        raise UnsupportedModel(
            f"{path!r} gives requests a {name} of {shown(value)}, which can't be: {reason}. "
            "Correct it, or start with --sampling-defaults openai"
        )
