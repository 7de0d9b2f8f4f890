"""The text side of a Hugging Face folder: tokenizer.json, the chat template, and how its makers sample.

The encoding is the `tokenizers` package's, from the folder's own description of it, *without* the model's control
tokens: no text whatever becomes one (see `tokenizer`).

    tokenizer.json           the vocabulary, merges, how text is cut; which tokens are special
    tokenizer_config.json    names of special tokens, a chat template
    chat_template.jinja      the chat template, where there is one
    generation_config.json   which ids end a text, default sampling
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final

import msgspec
import numpy as np
import tokenizers

from headrace.ops.weights.folder import CONFIG, ModelFolder, read_json
from headrace.ops.weights.gguf import BadModelFile, open_regular
from headrace.ops.wire import I32
from headrace.server.byte_level import byte_level_bytes
from headrace.server.vocabulary import CONTROLS, END_TEXTS, BadText, BadTokenizer, Kind

TOKENIZER: Final = "tokenizer.json"
TOKENIZER_CONFIG: Final = "tokenizer_config.json"
TEMPLATE: Final = "chat_template.jinja"
GENERATION: Final = "generation_config.json"
MAX_TOKENIZER_BYTES: Final = 128 << 20
"""Gemma's has 33 MB."""
MAX_SMALL_BYTES: Final = 16 << 20
MAX_TEMPLATE_BYTES: Final = 1 << 20

_SPACE: Final = "\u2581"
_HIDDEN: Final = "\U0010ffff"
"""Begins the text under which the encoder knows a control token. After the byte alphabet no text has it; elsewhere no
merge leads there."""
_BYTE_TOKEN: Final = re.compile("<0x([0-9A-Fa-f]{2})>")
# Keys of the model that change nothing when they have one of these values.
_INERT: Final[dict[str, tuple[object, ...]]] = {
    "dropout": (None, 0),
    "continuing_subword_prefix": (None, ""),
    "end_of_word_suffix": (None, ""),
}
# Steps by which SentencePiece's tokens become text, and what they must say, as `FolderEncoder.token_bytes` does it.
_SPACES: Final[dict[str, dict[str, object]]] = {
    "Replace": {"pattern": {"String": _SPACE}, "content": " "},
    "ByteFallback": {},
    "Fuse": {},
    "Strip": {"content": " ", "start": 1, "stop": 0},
    "Metaspace": {"replacement": _SPACE},
}
_SPECIAL: Final = ("bos_token", "eos_token", "unk_token", "pad_token")

_TIKTOKEN: Final = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|%s| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_CUT_BEFORE_SPACES: Final = frozenset({_TIKTOKEN % r"\p{N}{1,3}", _TIKTOKEN % r"\p{N}"})
"""Patterns of Llama 3 and Qwen by which every word ends before a space: there long text can be cut."""
_CUT: Final = r"(?<=\S)(?= )"


class FolderVocabulary:
    """A folder's tokenizer, checked; what `Tokenizer` is made of."""

    def __init__(self, folder: ModelFolder) -> None:
        """Raises BadTokenizer, BadModelFile."""
        path = Path(folder.path)
        missing = f"{folder.path!r} has no {TOKENIZER}. {_make_tokenizer(path)}"
        self._described = read_json(path / TOKENIZER, MAX_TOKENIZER_BYTES, missing)
        self._config = read_small(path / TOKENIZER_CONFIG)
        if self._config.get("auto_map"):
            raise BadTokenizer(f"its {TOKENIZER_CONFIG} names code of its own (auto_map), and none is ever executed")
        self._family = _family(self._described)
        self._added = _added_tokens(self._described)
        self.texts, self.types = _tokens(self._described, self._added, _vocab_size(folder))
        self._ids = {text: index for index, text in enumerate(self.texts)}
        self._names = _special_names(self._config, self._ids)
        self.bos_id = self._ids.get(self._names.get("bos_token", ""))
        self.eos_id = self._ids.get(self._names.get("eos_token", ""))
        self._stops = _eos_ids(folder.config, CONFIG) + _eos_ids(read_small(path / GENERATION), GENERATION)
        for index in self._stops:
            if index >= len(self.texts):
                raise BadTokenizer(f"eos_token_id is {index}, but the model has {len(self.texts)} tokens")
        self.add_bos = self._adds_bos()
        if self._config.get("add_eos_token") is True:
            raise BadTokenizer(
                f"{TOKENIZER_CONFIG} has every prompt end with eos_token (add_eos_token), which is not supported: set "
                "it to false"
            )

    def control_ids(self) -> list[int]:
        return [index for index, kind in enumerate(self.types) if kind in CONTROLS]

    def user_defined(self) -> list[str]:
        """Whole words that are found in any text before it is cut (<think> in some models)."""
        return [text for text, kind in zip(self.texts, self.types) if kind == Kind.USER_DEFINED]

    def stop_ids(self) -> tuple[int, ...]:
        known = (index for index in self.control_ids() if self.texts[index] in END_TEXTS)
        named = () if self.eos_id is None else (self.eos_id,)
        return tuple(sorted({*known, *named, *self._stops}))

    def special_texts(self) -> dict[str, str]:
        return dict(self._names)

    def encoder(self) -> FolderEncoder:
        """Raises BadTokenizer."""
        return FolderEncoder(_without_controls(self._described, self._added), self._family, self.user_defined())

    def _adds_bos(self) -> bool:
        """As the config says, or what is put around a text says."""
        said, begins = self._config.get("add_bos_token"), _begins_with_bos(self._described, self._names)
        if not isinstance(said, bool):
            said = begins
        if said and self.bos_id is None:
            raise BadTokenizer(f"a prompt begins with bos_token, which {TOKENIZER_CONFIG} does not name")
        return said


class FolderEncoder:
    """Text to ids by the folder's own description."""

    def __init__(self, described: dict[str, Any], family: str, user_defined: list[str]) -> None:
        self._family = family
        self._begins_with_space = _metaspace(described).get("prepend_scheme") == "first"
        described["pre_tokenizer"] = _unprefixed(described.get("pre_tokenizer"))
        with _refusing(lambda error: BadTokenizer(f"its {TOKENIZER} can't be used: {error}")):
            self._tokenizer = tokenizers.Tokenizer.from_str(msgspec.json.encode(described).decode())
        can_cut = _is_cut_before_spaces(described) and not any(re.search(_CUT, text) for text in user_defined)
        self.cut = re.compile(_CUT) if can_cut else None

    def begun(self, text: str, is_first: bool) -> str:
        """A text that stands between control tokens, as it is encoded; `is_first`: none is before it."""
        has_space = text.startswith((" ", _SPACE))
        return f" {text}" if self._begins_with_space and is_first and not has_space else text

    def encode(self, text: str) -> I32:
        # A pattern that tries too many ways to match.
        with _refusing(lambda error: BadText(f"the model's {TOKENIZER} can't cut the text into words: {error}")):
            return np.array(self._tokenizer.encode(text, add_special_tokens=False).ids, np.int32)

    def token_bytes(self, text: str, kind: int) -> bytes:
        if kind in (*CONTROLS, Kind.USER_DEFINED):
            return text.encode()
        if self._family == "byte level":
            return byte_level_bytes(text)
        if match := _BYTE_TOKEN.fullmatch(text):
            return bytes.fromhex(match[1])
        return text.replace(_SPACE, " ").encode()


@contextmanager
def _refusing(because: Callable[[BaseException], Exception]) -> Iterator[None]:
    """The package raises nothing narrower than Exception, and where it panics not even that."""
    try:
        yield
    except BaseException as error:
        if isinstance(error, Exception) or type(error).__name__ == "PanicException":
            raise because(error) from error
        raise


# ---------------------------------------------------------------------------------------------------------------
# The chat template, and sampling


def folder_template(folder: ModelFolder) -> str | None:
    """The source of the chat template, if there is one. Raises BadModelFile."""
    path = Path(folder.path) / TEMPLATE
    try:
        with open_regular(path) as file:
            content = file.read(MAX_TEMPLATE_BYTES)
    except FileNotFoundError:
        return _config_template(read_small(Path(folder.path) / TOKENIZER_CONFIG).get("chat_template"))
    except OSError as error:
        raise BadModelFile(f"{str(path)!r} can't be read: {error.strerror}") from error
    try:
        return content.decode()
    except UnicodeDecodeError as error:
        raise BadModelFile(f"{str(path)!r} is not UTF-8 text at byte {error.start}. Save it as UTF-8") from None


def _config_template(value: object) -> str | None:
    """One template, or several by name, of which "default" is for conversations."""
    if isinstance(value, list):
        named = {each.get("name"): each.get("template") for each in value if isinstance(each, dict)}
        value = named.get("default")
    return value if isinstance(value, str) else None


def read_small(path: Path) -> dict[str, Any]:
    """A JSON object that may be missing: then it is empty. Raises BadModelFile."""
    return read_json(path, MAX_SMALL_BYTES, "") if path.exists() else {}


def _eos_ids(config: Mapping[str, Any], name: str) -> list[int]:
    value = config.get("eos_token_id")
    ids = value if isinstance(value, list) else [] if value is None else [value]
    if not all(type(index) is int and index >= 0 for index in ids):
        raise BadTokenizer(f"eos_token_id of {name} is {str(value)[:80]}; it must be an id, or a list of ids")
    return ids


# ---------------------------------------------------------------------------------------------------------------
# tokenizer.json


def _family(described: Mapping[str, Any]) -> str:
    """How bytes are written in tokens: "byte level", or "spaces" (SentencePiece's). Raises BadTokenizer."""
    said = described.get("model")
    model: dict[str, Any] = said if isinstance(said, dict) else {}
    if model.get("type") != "BPE":
        raise BadTokenizer(f"the model of its {TOKENIZER} is {str(model.get('type'))[:80]!r}. Supported: 'BPE'")
    for key, inert in _INERT.items():
        if model.get(key) not in inert:
            raise BadTokenizer(f"the model of its {TOKENIZER} has {key} {str(model[key])[:80]!r}: not supported")
    steps = _steps(described.get("decoder"), "decoders")
    kinds = {str(step.get("type")) for step in steps}
    if kinds and kinds <= {"ByteLevel", "Fuse"}:
        return "byte level"
    if kinds and kinds <= _SPACES.keys() and all(_SPACES[step["type"]].items() <= step.items() for step in steps):
        return "spaces"
    raise BadTokenizer(f"its {TOKENIZER} turns tokens into text by {sorted(kinds)}, in a way that is not supported")


def _steps(value: object, inside: str) -> list[dict[str, Any]]:
    """A step of the description, or those of a sequence."""
    if not isinstance(value, dict):
        return []
    if value.get("type") == "Sequence":
        steps = value.get(inside)
        if not isinstance(steps, list):
            raise BadTokenizer(f"its {TOKENIZER} has a sequence without a list of {inside}")
        return [step for each in steps for step in _steps(each, inside)]
    return [value]


class _Added(msgspec.Struct):
    """An entry of `added_tokens`."""

    id: int
    content: str
    special: bool = False
    single_word: bool = False
    lstrip: bool = False
    rstrip: bool = False
    normalized: bool = False


def _added_tokens(described: Mapping[str, Any]) -> list[_Added]:
    try:
        added = msgspec.convert(described.get("added_tokens") or [], list[_Added])
    except msgspec.ValidationError as error:
        raise BadTokenizer(f"its {TOKENIZER} has added_tokens that can't be read: {error}") from None
    for token in added:
        if token.special and (token.lstrip or token.rstrip or token.single_word):
            raise BadTokenizer(f"its control token {token.content[:80]!r} takes white space with it: not supported")
    return [token for token in added if token.content]


def _tokens(described: Mapping[str, Any], added: list[_Added], vocab_size: int) -> tuple[list[str], list[int]]:
    """Texts and kinds of all ids of the model; ids that the tokenizer lacks have no text."""
    vocabulary = described["model"].get("vocab")
    if not isinstance(vocabulary, dict) or not all(type(index) is int for index in vocabulary.values()):
        raise BadTokenizer(f"its {TOKENIZER} has no vocabulary")
    for index in (*vocabulary.values(), *(token.id for token in added)):
        if not 0 <= index < vocab_size:
            raise BadTokenizer(f"its {TOKENIZER} has the id {index}, but the model has the ids 0 to {vocab_size - 1}")
    texts, types = [""] * vocab_size, [int(Kind.UNUSED)] * vocab_size
    named = {token.content: token.id for token in added}
    for text, index in (*vocabulary.items(), *named.items()):
        if texts[index] not in ("", text) or named.get(text, index) != index:
            raise BadTokenizer(
                f"its {TOKENIZER} gives the text {text[:80]!r} more than one id, or its id {index} more than one text"
            )
        texts[index], types[index] = text, Kind.NORMAL
    for token in added:
        types[token.id] = Kind.CONTROL if token.special else Kind.USER_DEFINED
    return texts, types


def _without_controls(described: Mapping[str, Any], added: list[_Added]) -> dict[str, Any]:
    """The description of an encoder that gives ids of all tokens but the special ones, which keep their ids and lose
    their texts."""
    hidden = {token.content: f"{_HIDDEN}{token.id}" for token in added if token.special}
    model = dict(described["model"])
    vocabulary = {hidden.get(text, text): index for text, index in model["vocab"].items()}
    # With their ids in the vocabulary they keep them, whatever else is added.
    vocabulary |= {token.content: token.id for token in added if not token.special}
    model["vocab"] = vocabulary
    merges = model.get("merges") or []
    if not isinstance(merges, list):
        raise BadTokenizer(f"its {TOKENIZER} has merges that can't be read")
    model["merges"] = [merge for merge in merges if not _gives(merge, hidden)]
    if isinstance(model.get("unk_token"), str):
        model["unk_token"] = hidden.get(model["unk_token"], model["unk_token"])
    kept = [msgspec.to_builtins(token) for token in added if not token.special]
    steps = {key: described.get(key) for key in ("normalizer", "pre_tokenizer")}
    return {"version": "1.0", "added_tokens": kept, "model": model, **steps}


def _gives(merge: object, hidden: Mapping[str, str]) -> bool:
    """Whether a merge ("a b", or ["a", "b"]) makes one of these tokens, or goes on from one."""
    parts = merge.split(" ") if isinstance(merge, str) else merge
    if not isinstance(parts, list) or not all(isinstance(part, str) for part in parts):
        raise BadTokenizer(f"its {TOKENIZER} has merges that can't be read")
    return "".join(parts) in hidden or any(part in hidden for part in parts)


def _metaspace(described: Mapping[str, Any]) -> dict[str, Any]:
    steps = _steps(described.get("pre_tokenizer"), "pretokenizers")
    return next((step for step in steps if step.get("type") == "Metaspace"), {})


def _unprefixed(step: Any) -> Any:
    """The same, less a space that is put before the first text only: the encoder doesn't know which that is."""
    if not isinstance(step, dict):
        return step
    if isinstance(step.get("pretokenizers"), list):
        return step | {"pretokenizers": [_unprefixed(each) for each in step["pretokenizers"]]}
    return step | {"prepend_scheme": "never"} if step.get("prepend_scheme") == "first" else step


def _is_cut_before_spaces(described: Mapping[str, Any]) -> bool:
    if _steps(described.get("normalizer"), "normalizers") not in ([], [{"type": "NFC"}]):
        return False
    splits = []
    for step in _steps(described.get("pre_tokenizer"), "pretokenizers"):
        if step.get("add_prefix_space"):
            return False
        pattern = step.get("pattern")
        splits.append(pattern.get("Regex") if isinstance(pattern, dict) else "" if step.get("use_regex") else None)
    known = {*_CUT_BEFORE_SPACES, ""}
    return any(split in known for split in splits)


def _begins_with_bos(described: Mapping[str, Any], names: Mapping[str, str]) -> bool:
    """Whether the first token is put before a text. Raises BadTokenizer where anything else is put around it."""
    begins = False
    for step in _steps(described.get("post_processor"), "processors"):
        if step.get("type") == "ByteLevel":  # only tells where words stand in the text
            continue
        single = step.get("single") if step.get("type") == "TemplateProcessing" else None
        around = [_around(piece) for piece in single] if isinstance(single, list) else [""]
        if around not in ([None], [names.get("bos_token", ""), None]):
            raise BadTokenizer(
                f"its {TOKENIZER} puts something else around a text than bos_token before it (post_processor): not "
                "supported"
            )
        begins = begins or len(around) > 1
    return begins


def _around(piece: object) -> str | None:
    """Of a template's piece, the token; None for the text itself."""
    if not isinstance(piece, dict) or "Sequence" in piece:
        return None
    special = piece.get("SpecialToken")
    return str(special.get("id")) if isinstance(special, dict) else ""


def _special_names(config: Mapping[str, Any], ids: Mapping[str, int]) -> dict[str, str]:
    """Names of special tokens → their texts. Raises BadTokenizer where the first or the last is no token."""
    names = {}
    for name in _SPECIAL:
        value = config.get(name)
        text = value.get("content") if isinstance(value, dict) else value
        if isinstance(text, str) and text in ids:
            names[name] = text
        elif value is not None and name in ("bos_token", "eos_token"):
            raise BadTokenizer(
                f"{name} of its {TOKENIZER_CONFIG} is {str(text)[:80]!r}, which {TOKENIZER} does not have"
            )
    return names


def _vocab_size(folder: ModelFolder) -> int:
    value = folder.config.get("vocab_size")
    assert type(value) is int and value > 0, "the config has been checked"
    return value


def _make_tokenizer(path: Path) -> str:
    others: Iterable[str] = ("tokenizer.model", "vocab.json", "vocab.txt", "tekken.json")
    found = [name for name in others if (path / name).exists()]
    if found:
        return f"Make one of its {found[0]}: AutoTokenizer.from_pretrained(…).save_pretrained(…) of transformers"
    return "The folder is incomplete: fetch it again"
