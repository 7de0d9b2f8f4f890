"""What an architecture is to the reader of model files: names, and how the two formats describe it.

Most decoders say the same things under the same keys. `gguf_decoder` and `folder_decoder` read those; an architecture's
file says what differs.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final, NamedTuple

from headrace.ops.models.config import MAX_CONTEXT_TOKENS, ModelConfig, Pairs, Rope
from headrace.ops.models.keys import INCOMPLETE, Keys
from headrace.ops.models.rope import folder_rope, gguf_rope
from headrace.ops.models.tensors import FOLDER_NAMES, Names, check_tensors, parameters
from headrace.ops.weights.folder import ModelFolder
from headrace.ops.weights.gguf import GgufFile


class Architecture(NamedTuple):
    """Reads one architecture's files."""

    name: str
    """GGUF's `general.architecture`."""
    class_name: str
    """Hugging Face's `architectures`."""
    model_type: str
    """And its `model_type`, by which it chooses a class."""
    from_gguf: Callable[[Keys, GgufFile], ModelConfig] | None
    """None: GGUF has no such architecture."""
    from_folder: Callable[[Keys, ModelFolder], ModelConfig]
    folder_names: Names = FOLDER_NAMES
    """GGUF's names of tensors → Hugging Face's."""


def gguf_decoder(keys: Keys, file: GgufFile, name: str, rope_pairs: Pairs, **differences: Any) -> ModelConfig:
    """What a GGUF of the architecture `name` says; `differences`: fields of `ModelConfig`, whose keys have been read.

    Raises UnsupportedModel, also for keys under `name` that nobody has read and for tensors that don't fit.
    """
    hidden = keys.count(f"{name}.embedding_length")
    heads = keys.count(f"{name}.attention.head_count")
    layers = keys.count(f"{name}.block_count")
    # Every layer has tensors, so that a count beyond theirs is a lie, found before anything is sized by it.
    if layers > len(file.tensors):
        raise keys.refused(f"{name}.block_count is {layers}, but the file has {len(file.tensors)} tensors")
    head_dim = keys.count(f"{name}.attention.key_length", _share(keys, hidden, heads, f"{name}.attention.key_length"))
    kv_heads = keys.count(f"{name}.attention.head_count_kv", heads)
    _check_heads(keys, heads, kv_heads, head_dim)
    keys.must_be(f"{name}.attention.value_length", (head_dim,))
    keys.must_be(f"{name}.rope.dimension_count", (head_dim,))
    config = ModelConfig(
        architecture=name,
        name=keys.name("general.name", _stem(file.path)),
        vocab_size=_vocab_size(keys, file, name),
        layers=layers,
        hidden=hidden,
        heads=heads,
        kv_heads=kv_heads,
        head_dim=head_dim,
        intermediate=keys.count(f"{name}.feed_forward_length"),
        rope=gguf_rope(keys, file, name, head_dim),
        rotary_dim=head_dim,
        rope_pairs=rope_pairs,
        norm_eps=keys.positive(f"{name}.attention.layer_norm_rms_epsilon"),
        context_tokens=keys.count(f"{name}.context_length", most=MAX_CONTEXT_TOKENS),
        tied_embeddings="output.weight" not in file.tensors,
        parameters=parameters(file, "rope_freqs.weight"),
        **differences,
    )
    _check_inert(keys, name)
    check_tensors(keys, file, config, ignored=("rope_freqs.weight",))
    return config


def folder_decoder(
    keys: Keys,
    file: ModelFolder,
    name: str,
    *,
    head_dim: int | None = None,
    names: Names = FOLDER_NAMES,
    rope: Rope | None = None,
    tied: bool = False,
    **differences: Any,
) -> ModelConfig:
    """The same for a folder's config.json. `head_dim`: of heads where the config says nothing, if that isn't
    `hidden_size` / heads; `rope`: where it isn't described as usual; `tied`: whether the embeddings are, where the
    config says nothing.

    Keys that Hugging Face's class of that name doesn't read are ignored there, and so they are here.
    """
    hidden = keys.count("hidden_size")
    heads = keys.count("num_attention_heads")
    layers = keys.count("num_hidden_layers")
    if layers > len(file.tensors):
        raise keys.refused(f"num_hidden_layers is {layers}, but the folder has {len(file.tensors)} tensors")
    head_dim = keys.count("head_dim", head_dim or _share(keys, hidden, heads, "head_dim"))
    kv_heads = keys.count("num_key_value_heads", heads)
    _check_heads(keys, heads, kv_heads, head_dim)
    tied = keys.flag("tie_word_embeddings", tied)
    _check_tied(keys, file, tied)
    for key, allowed in _FOLDER_INERT.items():
        keys.must_be(key, allowed)
    activation = differences.get("activation", "silu")
    # Gemma's configs have both keys, of which the second counts.
    has_own = activation == "gelu" and "hidden_activation" in keys
    keys.must_be("hidden_activation" if has_own else "hidden_act", _ACTIVATIONS[activation])
    refuse_foreign(keys)
    config = ModelConfig(
        architecture=name,
        name=keys.name("_name", _stem(file.path)),
        vocab_size=keys.count("vocab_size"),
        layers=layers,
        hidden=hidden,
        heads=heads,
        kv_heads=kv_heads,
        head_dim=head_dim,
        intermediate=keys.count("intermediate_size"),
        rope=rope or folder_rope(keys, head_dim),
        rotary_dim=head_dim,
        rope_pairs="halves",
        norm_eps=keys.positive("rms_norm_eps"),
        context_tokens=keys.count("max_position_embeddings", most=MAX_CONTEXT_TOKENS),
        tied_embeddings=tied,
        parameters=parameters(file, *(["lm_head.weight"] if tied else [])),
        **differences,
    )
    # A tied projection may be stored all the same; old files have the rotary frequencies.
    ignored = (".rotary_emb.inv_freq", *(("lm_head.weight",) if tied else ()))
    check_tensors(keys, file, config, names, ignored)
    return config


def refuse_foreign(keys: Keys) -> None:
    """Raises UnsupportedModel for a config.json that names weights or code which are not read."""
    for key, why in _FOLDER_REFUSED.items():
        if key in keys:
            raise keys.refused(f"its {key} {why}")


def windows(window_tokens: int, layers: tuple[int, ...], context_tokens: int) -> dict[str, Any]:
    """Fields of `ModelConfig` for layers with a window, if it ever hides anything."""
    if not layers or not 0 < window_tokens < context_tokens:
        return {}
    return {"window_tokens": window_tokens, "window_layers": layers}


def folder_window_layers(keys: Keys) -> tuple[int, ...] | None:
    """The layers that `layer_types` gives a window; None where it is absent."""
    if "layer_types" not in keys:
        return None
    types = keys.texts("layer_types")
    layers = keys.count("num_hidden_layers")
    if len(types) != layers:
        raise keys.refused(f"layer_types has {len(types)} items for {layers} layers")
    for kind in types:
        if kind not in ("full_attention", "sliding_attention"):
            raise keys.refused(f"layer_types has {kind[:80]!r}; only full and sliding attention are supported")
    return tuple(index for index, kind in enumerate(types) if kind == "sliding_attention")


def must_have_windows(keys: Keys, layers: tuple[int, ...]) -> None:
    """Raises UnsupportedModel where `layer_types`, at which nobody else looks, gives a window to others than these."""
    said = folder_window_layers(keys)
    if said is not None and said != layers:
        raise keys.refused(
            f"its layer_types gives a window to {len(said)} layers, and the rest of the config to {len(layers)}",
            "Correct one of the two",
        )


# Keys of a GGUF, after the architecture's name, that change nothing when they have one of these values. Any other key
# there is refused.
_INERT: Final[dict[str, tuple[object, ...]]] = {
    "expert_count": (0,),
    "expert_used_count": (0,),
    "attention.causal": (True,),
    "attention.sliding_window": (0,),
    "use_parallel_residual": (False,),
    "tensor_data_layout": ("Meta AI original pth",),
}

_FOLDER_INERT: Final[dict[str, tuple[object, ...]]] = {
    "attention_bias": (False,),
    "mlp_bias": (False,),
    "partial_rotary_factor": (1, 1.0),
}
_ACTIVATIONS: Final = {"silu": ("silu", "swish"), "gelu": ("gelu_pytorch_tanh", "gelu_new")}
_COMPARED_BYTES: Final = 1 << 20
_FOLDER_REFUSED: Final = {
    "quantization_config": "says that its weights are quantized in a way that is not read: use the unquantized model",
    "auto_map": "names code of the model's own, and nothing in a folder is ever executed",
}


def _check_inert(keys: Keys, name: str) -> None:
    for key in keys.unread(f"{name}."):
        short = key.removeprefix(f"{name}.")
        if short not in _INERT:
            raise keys.refused(f"it has the key {key!r}, whose effect on the model is not implemented")
        keys.must_be(key, _INERT[short])


def _check_tied(keys: Keys, file: ModelFolder, tied: bool) -> None:
    """Raises UnsupportedModel where the config and the weights don't agree on what gives logits: releases of Hugging
    Face's transformers differ on which of them counts."""
    embeddings, output = (file.tensors.get(f"{name}.weight") for name in ("model.embed_tokens", "lm_head"))
    if output is None and not tied:
        raise keys.refused(
            "it lacks the tensor lm_head.weight, and does not say that the embeddings stand for it",
            "Set tie_word_embeddings to true if they do, else fetch the folder again",
        )
    if output is None or embeddings is None or not tied:
        return
    same = output.kind == embeddings.kind and output.shape == embeddings.shape
    if not same or not _equal(file.bytes_of(output), file.bytes_of(embeddings)):
        raise keys.refused(
            "its embeddings are tied, but it has another lm_head.weight too",
            "Set tie_word_embeddings to false, or take that tensor out",
        )


def _equal(left: memoryview, right: memoryview) -> bool:
    """Bytes of equal number; comparing memoryviews themselves takes 30 times as long."""
    return all(
        left[at : at + _COMPARED_BYTES].tobytes() == right[at : at + _COMPARED_BYTES].tobytes()
        for at in range(0, len(left), _COMPARED_BYTES)
    )


def _check_heads(keys: Keys, heads: int, kv_heads: int, head_dim: int) -> None:
    if heads % kv_heads:
        raise keys.refused(f"{heads} attention heads can't share {kv_heads} KV heads evenly")
    if head_dim % 2:
        raise keys.refused(f"a head dimension of {head_dim} can't be rotated in pairs")


def _share(keys: Keys, hidden: int, heads: int, key: str) -> int:
    if key not in keys and hidden % heads:
        raise keys.refused(f"a hidden size of {hidden} can't be divided among {heads} heads")
    return hidden // heads


def _vocab_size(keys: Keys, file: GgufFile, name: str) -> int:
    """The embedding table's rows; the tokenizer and the key, where there, must agree, or ids would miss it."""
    embedding = file.tensors.get("token_embd.weight")
    if embedding is None:
        raise keys.refused("it lacks the tensor token_embd.weight", INCOMPLETE)
    vocab_size = embedding.shape[0]
    keys.must_be(f"{name}.vocab_size", (vocab_size,))
    tokens = file.metadata.get("tokenizer.ggml.tokens")
    if isinstance(tokens, list) and len(tokens) != vocab_size:
        raise keys.refused(f"its tokenizer has {len(tokens)} tokens, its embedding table {vocab_size} rows")
    return vocab_size


def _stem(path: str) -> str:
    return path.rstrip("/").rsplit("/", 1)[-1].removesuffix(".gguf")
