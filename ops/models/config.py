"""What a model file says about its model, checked: the server plans with it, the worker builds from it. No torch here.

A key or tensor whose meaning this reader doesn't know is refused, never ignored: it might be what makes the model's
output differ (a rope scaling, a bias, a soft cap), and then every answer would be quietly wrong.
"""

from __future__ import annotations

import math
from typing import Final, Literal

import msgspec

from headrace.ops.weights.gguf import GgufFile, TensorInfo

ARCHITECTURES: Final = ("llama",)
"""What can be served."""

MAX_CONTEXT_TOKENS: Final = 1 << 24
MAX_NAME_CHARS: Final = 120


class UnsupportedModel(ValueError):
    """The file is well-formed, but not a model that can be served. The message says why, and what can."""


class ModelConfig(msgspec.Struct, frozen=True):
    """The shape of a model, and the constants of its layers."""

    architecture: str
    name: str
    """For people: printable, at most `MAX_NAME_CHARS`."""
    vocab_size: int
    layers: int
    hidden: int
    heads: int
    kv_heads: int
    head_dim: int
    intermediate: int
    rope_theta: float
    rotary_dim: int
    """How many of a head's dimensions are rotated, from the first on."""
    rope_pairs: Literal["interleaved", "halves"]
    """Which dimensions rotate together: (2i, 2i + 1), or (i, i + rotary_dim / 2).

    Llama's GGUF is "interleaved" ("NORM" in llama.cpp): its converter reorders the rows of q and k, head by head, from
    Hugging Face's halves. With the default model and interleaved pairs all greedy ids of the reference come out and
    log-probabilities differ by 2e-5; with halves, a third of the ids."""
    norm_eps: float
    context_tokens: int
    """The longest context that the model was trained for."""
    tied_embeddings: bool
    """The output projection is the embedding table."""
    parameters: int
    window_tokens: int = 0
    """Sliding-window attention over so many tokens; 0 is full attention."""

    @property
    def not_compiled(self) -> str:
        """Why the compiled kernels (`ops.simd`) can't run the model; empty where they can."""
        for name, size in (("heads", self.head_dim), ("rotated parts of heads", self.rotary_dim)):
            if size % 16:
                return f"its {name} have {size} dimensions, which is no multiple of 16"
        return ""

    @classmethod
    def from_gguf(cls, file: GgufFile) -> ModelConfig:
        """Raises UnsupportedModel, also when tensors are missing, too many, or of another shape than they should be."""
        keys = _Keys(file)
        architecture = keys.text("general.architecture")
        if architecture not in ARCHITECTURES:
            supported = f"Supported architectures: {', '.join(ARCHITECTURES)}"
            raise keys.refused(f"its architecture is {_shown(architecture)}", supported)
        keys.must_be("general.type", ("model",))
        return _llama(keys, file)


def _llama(keys: _Keys, file: GgufFile) -> ModelConfig:
    hidden = keys.count("llama.embedding_length")
    heads = keys.count("llama.attention.head_count")
    kv_heads = keys.count("llama.attention.head_count_kv", heads)
    if "llama.attention.key_length" not in file.metadata and hidden % heads:
        raise keys.refused(f"a hidden size of {hidden} can't be divided among {heads} heads")
    head_dim = keys.count("llama.attention.key_length", hidden // heads)
    layers = keys.count("llama.block_count")
    # Every layer has tensors, so that a count beyond theirs is a lie, found before anything is sized by it.
    if layers > len(file.tensors):
        raise keys.refused(f"llama.block_count is {layers}, but the file has {len(file.tensors)} tensors")
    if heads % kv_heads:
        raise keys.refused(f"{heads} attention heads can't share {kv_heads} KV heads evenly")
    if head_dim % 2:
        raise keys.refused(f"a head dimension of {head_dim} can't be rotated in pairs")
    keys.must_be("llama.attention.value_length", (head_dim,))
    keys.must_be("llama.rope.dimension_count", (head_dim,))
    vocab_size = _vocab_size(keys, file)
    config = ModelConfig(
        architecture="llama",
        name=keys.name(),
        vocab_size=vocab_size,
        layers=layers,
        hidden=hidden,
        heads=heads,
        kv_heads=kv_heads,
        head_dim=head_dim,
        intermediate=keys.count("llama.feed_forward_length"),
        rope_theta=keys.positive("llama.rope.freq_base", 10000.0),
        rotary_dim=head_dim,
        rope_pairs="interleaved",
        norm_eps=keys.positive("llama.attention.layer_norm_rms_epsilon"),
        context_tokens=keys.count("llama.context_length", most=MAX_CONTEXT_TOKENS),
        tied_embeddings="output.weight" not in file.tensors,
        parameters=sum(tensor.elements for tensor in file.tensors.values()),
    )
    _check_inert(keys)
    _check_tensors(keys, file, llama_tensors(config))
    return config


def llama_tensors(config: ModelConfig) -> dict[str, tuple[int, ...]]:
    """Names and shapes, as torch has them, of all tensors of a Llama GGUF: projections are [out, in]."""
    query, key_value = config.heads * config.head_dim, config.kv_heads * config.head_dim
    tensors: dict[str, tuple[int, ...]] = {
        "token_embd.weight": (config.vocab_size, config.hidden),
        "output_norm.weight": (config.hidden,),
    }
    if not config.tied_embeddings:
        tensors["output.weight"] = (config.vocab_size, config.hidden)
    for layer in range(config.layers):
        tensors |= {
            f"blk.{layer}.attn_norm.weight": (config.hidden,),
            f"blk.{layer}.attn_q.weight": (query, config.hidden),
            f"blk.{layer}.attn_k.weight": (key_value, config.hidden),
            f"blk.{layer}.attn_v.weight": (key_value, config.hidden),
            f"blk.{layer}.attn_output.weight": (config.hidden, query),
            f"blk.{layer}.ffn_norm.weight": (config.hidden,),
            f"blk.{layer}.ffn_gate.weight": (config.intermediate, config.hidden),
            f"blk.{layer}.ffn_up.weight": (config.intermediate, config.hidden),
            f"blk.{layer}.ffn_down.weight": (config.hidden, config.intermediate),
        }
    return tensors


def _vocab_size(keys: _Keys, file: GgufFile) -> int:
    """The embedding table's rows; the tokenizer and the key, where there, must agree, or ids would miss it."""
    embedding = file.tensors.get("token_embd.weight")
    if embedding is None:
        raise keys.refused("it lacks the tensor token_embd.weight", "The file is incomplete: convert it again")
    vocab_size = embedding.shape[0]
    keys.must_be("llama.vocab_size", (vocab_size,))
    tokens = file.metadata.get("tokenizer.ggml.tokens")
    if isinstance(tokens, list) and len(tokens) != vocab_size:
        raise keys.refused(f"its tokenizer has {len(tokens)} tokens, its embedding table {vocab_size} rows")
    return vocab_size


# Keys under `llama.` that change nothing when they have one of these values. Any other key there is refused.
_INERT: Final[dict[str, tuple[object, ...]]] = {
    "llama.expert_count": (0,),
    "llama.expert_used_count": (0,),
    "llama.rope.scaling.type": ("none",),
    "llama.rope.scaling.factor": (0.0, 1.0),
    "llama.rope.scaling.attn_factor": (0.0, 1.0),
    "llama.rope.scale_linear": (1.0,),
    "llama.attention.causal": (True,),
    "llama.attention.sliding_window": (0,),
    "llama.use_parallel_residual": (False,),
    "llama.tensor_data_layout": ("Meta AI original pth",),
}
# Meaningless unless a rope scaling is set.
_INERT_ANY_VALUE: Final = ("llama.rope.scaling.original_context_length", "llama.rope.scaling.finetuned")


def _check_inert(keys: _Keys) -> None:
    for key in keys.unread("llama."):
        if key in _INERT:
            keys.must_be(key, _INERT[key])
        elif key not in _INERT_ANY_VALUE:
            raise keys.refused(f"it has the key {key!r}, whose effect on the model is not implemented")


def _check_tensors(keys: _Keys, file: GgufFile, expected: dict[str, tuple[int, ...]]) -> None:
    for name, shape in expected.items():
        tensor = file.tensors.get(name)
        if tensor is None:
            raise keys.refused(f"it lacks the tensor {name}", "The file is incomplete: convert it again")
        if tensor.shape != shape:
            raise keys.refused(f"the tensor {name} has the shape {tensor.shape}, but its metadata ask for {shape}")
    for name, tensor in file.tensors.items():
        if name not in expected:
            raise keys.refused(f"it has the tensor {name!r} ({_purpose(tensor)}), which headrace's Llama does not have")


def _purpose(tensor: TensorInfo) -> str:
    if tensor.name.startswith("rope_freqs"):
        return "a rope scaling, as in Llama 3.1"
    if "_exps" in tensor.name or "_gate_inp" in tensor.name:
        return "a mixture of experts"
    if tensor.name.endswith(".bias"):
        return "a bias"
    return f"{tensor.kind}, {tensor.shape}"


class _Keys:
    """Typed access to the metadata, remembering what was read."""

    def __init__(self, file: GgufFile) -> None:
        self._path = file.path
        self._metadata = file.metadata
        self._read: set[str] = set()

    def refused(self, what: str, advice: str = "Use a plain Llama model") -> UnsupportedModel:
        return UnsupportedModel(f"{self._path!r} can't be served: {what}. {advice}")

    def text(self, key: str) -> str:
        value = self._value(key)
        if not isinstance(value, str):
            raise self.refused(f"{key} is not a string")
        return value

    def count(self, key: str, default: int | None = None, most: int = (1 << 31) - 1) -> int:
        """An integer from 1 to `most`."""
        value = self._value(key, default)
        if isinstance(value, bool) or not isinstance(value, int) or not 1 <= value <= most:
            raise self.refused(f"{key} is {_shown(value)}, not a whole number from 1 to {most}")
        return value

    def positive(self, key: str, default: float | None = None) -> float:
        """A finite number above 0."""
        value = self._value(key, default)
        if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value) or value <= 0:
            raise self.refused(f"{key} is {_shown(value)}, not a positive number")
        return float(value)

    def must_be(self, key: str, allowed: tuple[object, ...]) -> None:
        """The key, if there, has one of these values."""
        if key not in self._metadata:
            return
        value = self._value(key)
        if not any(value == choice and isinstance(value, bool) == isinstance(choice, bool) for choice in allowed):
            raise self.refused(f"{key} is {_shown(value)}; only {' or '.join(map(repr, allowed))} is supported")

    def name(self) -> str:
        """The model's name, or the file's, fit for a log line."""
        value = self._metadata.get("general.name")
        given = value if isinstance(value, str) else ""
        return _printable(given) or _printable(self._path.rsplit("/", 1)[-1].removesuffix(".gguf")) or "unnamed"

    def unread(self, prefix: str) -> list[str]:
        return [key for key in self._metadata if key.startswith(prefix) and key not in self._read]

    def _value(self, key: str, default: object = None) -> object:
        self._read.add(key)
        value = self._metadata.get(key, default)
        if value is None:
            raise self.refused(f"it lacks the key {key}", "The file is incomplete: convert it again")
        return value


def _printable(text: str) -> str:
    return "".join(letter for letter in text[:MAX_NAME_CHARS] if letter.isprintable()).strip()


def _shown(value: object) -> str:
    if isinstance(value, list):
        return f"a list of {len(value)}"
    return repr(value[:80] if isinstance(value, str) else value)
