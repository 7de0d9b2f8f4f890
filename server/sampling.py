"""From what a client says about sampling to `SamplingParams`, with the checks that need the model."""

from __future__ import annotations

import secrets
from collections.abc import Iterable
from typing import Final, NamedTuple

from headrace.sched.grammar import Grammar
from headrace.sched.messages import SamplingParams
from headrace.server.errors import bad_request
from headrace.server.openai_requests import SamplingFields
from headrace.server.sampling_defaults import LEAST_SINGLE, SamplingDefaults, is_nearly_zero

_MASK_64: Final = (1 << 64) - 1
_MASK_63: Final = (1 << 63) - 1


class Vocabulary(NamedTuple):
    """What of the model's text side sampling needs."""

    size: int
    stop_ids: tuple[int, ...]
    """Ids that end a text by themselves."""


def sampling_params(
    fields: SamplingFields,
    vocabulary: Vocabulary,
    defaults: SamplingDefaults,
    *,
    max_tokens: int,
    min_tokens: int,
    seed: int | None,
    logprobs: int = -1,
    prompt_logprobs: int = -1,
    prompt_logprobs_from: int = 1,
    grammar: Grammar | None = None,
) -> SamplingParams:
    """`defaults` where nothing is said; penalties of OpenAI's own are then 0.

    Raises ApiError 400 for ids outside the vocabulary and numbers that are nearly 0.
    """
    own_stops = fields.stop_token_ids or []
    check_ids(own_stops, vocabulary.size, "stop_token_ids")
    biases = fields.logit_bias or {}
    check_ids(biases, vocabulary.size, "logit_bias")
    for name in ("temperature", "top_p", "min_p", "frequency_penalty", "presence_penalty"):
        _check_single(getattr(fields, name), name)
    for bias in biases.values():
        _check_single(bias, "logit_bias")
    top_k = defaults.top_k if fields.top_k is None else fields.top_k
    model_stops = () if fields.ignore_eos else vocabulary.stop_ids
    return SamplingParams(
        max_tokens=max_tokens,
        temperature=_said(fields.temperature, defaults.temperature),
        # More than the whole vocabulary is the whole vocabulary.
        top_k=min(max(top_k, 0), vocabulary.size),
        top_p=_said(fields.top_p, defaults.top_p),
        min_p=_said(fields.min_p, defaults.min_p),
        seed=secrets.randbits(63) if seed is None else seed & _MASK_63,
        repetition_penalty=_said(fields.repetition_penalty, defaults.repetition_penalty),
        frequency_penalty=_said(fields.frequency_penalty, 0.0),
        presence_penalty=_said(fields.presence_penalty, 0.0),
        logit_bias=tuple(biases.items()),
        min_tokens=min_tokens,
        stop_ids=tuple(dict.fromkeys((*model_stops, *own_stops))),
        logprobs=logprobs,
        prompt_logprobs=prompt_logprobs,
        prompt_logprobs_from=max(prompt_logprobs_from, 1),
        grammar=grammar,
    )


def choice_seed(seed: int, choice: int) -> int:
    """The seed of choice i of n: the request's own for the first, a mix (SplitMix64) of it and i for the others."""
    if choice == 0:
        return seed
    mixed = (seed + choice * 0x9E3779B97F4A7C15) & _MASK_64
    mixed = (mixed ^ mixed >> 30) * 0xBF58476D1CE4E5B9 & _MASK_64
    mixed = (mixed ^ mixed >> 27) * 0x94D049BB133111EB & _MASK_64
    return (mixed ^ mixed >> 31) & _MASK_63


def check_ids(ids: Iterable[int], vocab_size: int, param: str) -> None:
    """Raises ApiError 400 for an id that the model doesn't have."""
    for id in ids:
        if not 0 <= id < vocab_size:
            raise bad_request(
                f"`{param}` holds the token id {id}, but the model's ids go from 0 to {vocab_size - 1}.",
                param,
                "invalid_token_id",
            )


def _check_single(value: float | None, param: str) -> None:
    """Raises ApiError 400 for a number that is nearly 0."""
    if value is not None and is_nearly_zero(value):
        raise bad_request(
            f"`{param}` is {value:g}; it must be 0 or at least {LEAST_SINGLE:.3g} in size.", param, "invalid_value"
        )


def _said(value: float | None, default: float) -> float:
    return default if value is None else value
