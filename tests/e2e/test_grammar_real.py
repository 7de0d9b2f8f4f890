"""Structured output from the real model: what comes parses and validates, and is the same however it was scheduled."""

from __future__ import annotations

import json
import random
import re
from pathlib import Path
from typing import Any

import jsonschema
import pytest
from e2e.asking import asking

from headrace.ops.weights.gguf import GgufFile
from headrace.sched.grammar import BadGrammar, Grammar
from headrace.sched.messages import SamplingParams
from headrace.server.tokenizer import Tokenizer

REGEXES = ("( [0-9]{1,3}){3,5}", " (yes|no), (because|although) [a-z ]{5,30}\\.")


@pytest.fixture(scope="module")
def vocabulary(model_file: Path) -> Tokenizer:
    with GgufFile.open(model_file) as file:
        return Tokenizer.from_gguf_metadata(file.metadata)


def random_schema(rng: random.Random, depth: int = 0) -> dict[str, Any]:
    """One whose texts are short: objects and arrays of bounded strings, numbers, enumerations."""
    kind = rng.choice(("object", "array", "string", "integer", "enum", "boolean", "anyOf"))
    if depth == 0:
        kind = "object"
    elif depth > 2:
        kind = rng.choice(("integer", "enum", "boolean"))
    match kind:
        case "object":
            names = [f"{rng.choice(('name', 'size', 'kind', 'tags'))}_{i}" for i in range(rng.randint(1, 3))]
            return {
                "type": "object",
                "properties": {name: random_schema(rng, depth + 1) for name in names},
                "required": rng.sample(names, rng.randint(1, len(names))),
                "additionalProperties": False,
            }
        case "array":
            return {"type": "array", "items": random_schema(rng, depth + 1), "maxItems": rng.randint(1, 3)}
        case "string":
            return {"type": "string", "minLength": rng.randint(0, 2), "maxLength": rng.randint(3, 12)}
        case "integer":
            low = rng.randint(-100, 100)
            return {"type": "integer", "minimum": low, "maximum": low + rng.randint(0, 500)}
        case "enum":
            return {"enum": rng.sample(["red", "green", "blue", 1, 2.5, None, True], rng.randint(1, 4))}
        case "anyOf":
            return {"anyOf": [random_schema(rng, depth + 1), {"type": "null"}]}
        case _:
            return {"type": "boolean"}


SCHEMAS = [random_schema(random.Random(seed)) for seed in range(4)]


def samplings(vocabulary: Tokenizer) -> list[SamplingParams]:
    """A mixed batch: schemas and regular expressions, greedy and drawn, and some without any."""
    grammars = [Grammar("json_schema", json.dumps(schema)) for schema in SCHEMAS]
    grammars += [Grammar("regex", regex) for regex in REGEXES]
    drawn = [
        SamplingParams(150, temperature=0.8 * (i % 2), seed=i, grammar=grammar, stop_ids=vocabulary.stop_ids)
        for i, grammar in enumerate(grammars)
    ]
    # Those without go on when the others have ended.
    return [*drawn, SamplingParams(120, temperature=0.0), SamplingParams(120, temperature=0.8, seed=4)]


async def test_b24_structured_output_is_valid_and_the_same_under_any_schedule(
    model_file: Path, vocabulary: Tokenizer
) -> None:
    prompt, asked = vocabulary.encode("Here is the record, as JSON:\n"), samplings(vocabulary)
    async with asking(model_file) as asker:
        cold = await asker.outputs(prompt, asked)
        assert asker.deepest == 2
        for handle, (ids, sampling) in enumerate(zip(cold, asked), 1):
            text, end = vocabulary.decode(ids), asker.ends[handle]
            match sampling.grammar:
                case Grammar("json_schema", schema):
                    jsonschema.validate(json.loads(text), json.loads(schema))
                case Grammar("regex", regex):
                    assert re.fullmatch(regex, text)
            assert end.reason == ("length" if sampling.grammar is None else "stop")
        assert await asker.outputs(prompt, asked) == cold
    async with asking(model_file, disable_overlap_schedule=True, chunked_prefill_size=3) as asker:
        assert await asker.outputs(prompt, asked) == cold
        assert asker.deepest == 1
    small = {"schedule_conservativeness": 0.1, "max_total_tokens": 256, "context_length": 256}
    async with asking(model_file, **small) as asker:
        assert await asker.outputs(prompt, asked) == cold
        assert sum(end.retractions for end in asker.ends.values()) > 0


async def test_a_killed_grammar_worker_costs_no_request(model_file: Path, vocabulary: Tokenizer) -> None:
    prompt = vocabulary.encode("Numbers:")
    sampling = SamplingParams(60, temperature=0.0, grammar=Grammar("regex", "( [0-9]{1,3}){12,15}"))
    async with asking(model_file) as asker:
        (alone,) = await asker.outputs(prompt, [sampling])
        asker.grammar_workers[0].kill()
        assert await asker.outputs(prompt, [sampling, sampling]) == [alone, alone]
        assert len(asker.grammar_workers) == 2


async def test_b33_a_bad_grammar_is_told_by_the_worker(model_file: Path) -> None:
    async with asking(model_file) as asker:
        with pytest.raises(BadGrammar, match="unclosed group"):
            await asker.engine.check_grammar(Grammar("regex", "((("))
        with pytest.raises(BadGrammar, match="nothing but an empty text"):
            await asker.engine.check_grammar(Grammar("regex", ""))
        await asker.engine.check_grammar(Grammar("regex", "a+"))


async def test_b33_a_long_chain_of_rules_does_not_end_the_worker(model_file: Path) -> None:
    links = 2000
    chain: dict[str, Any] = {f"a{i}": {"type": "array", "items": {"$ref": f"#/$defs/a{i + 1}"}} for i in range(links)}
    schema = {"$ref": "#/$defs/a0", "$defs": {**chain, f"a{links}": {"type": "string"}}}
    async with asking(model_file) as asker:
        await asker.engine.check_grammar(Grammar("json_schema", json.dumps(schema, separators=(",", ":"))))
        assert len(asker.grammar_workers) == 1


HOSTILE = {
    "allOf of patterns": Grammar(
        "json_schema",
        json.dumps({"allOf": [{"type": "string", "pattern": f".*{chr(97 + i)}.*"} for i in range(20)]}),
    ),
    "doubling rules": Grammar(
        "ebnf", "root ::= r1 r1\n" + "".join(f"r{i} ::= r{i + 1} r{i + 1}\n" for i in range(1, 25)) + 'r25 ::= "a"'
    ),
}


@pytest.mark.parametrize("name", list(HOSTILE))
async def test_b33_a_short_grammar_that_never_ends_is_refused_after_three_seconds_of_a_core(
    model_file: Path, name: str
) -> None:
    async with asking(model_file) as asker:
        with pytest.raises(BadGrammar, match="more than 3 s of a core"):
            await asker.engine.check_grammar(HOSTILE[name])
        await asker.engine.check_grammar(Grammar("regex", "a+"))
        assert len(asker.grammar_workers) == 2
