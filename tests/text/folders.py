"""Tokenizers built like those of four families, and small Hugging Face folders that have them."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import tokenizers
import transformers
from tokenizers import AddedToken, Regex, decoders, models, normalizers, pre_tokenizers, processors, trainers

from headrace.ops.weights.files import open_model_file
from headrace.server.tokenizer import Tokenizer

VOCAB = 700
CORPUS = [
    "The quick brown fox jumps over the lazy dog's 1234 tails.  Is it?\n\n",
    "Größe, naïve, 你好 мир\t12",
    "<s> a</s>",
]
LLAMA3 = "|".join(
    (
        r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}",
        r" ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+",
    )
)
TEMPLATE = "{{ bos_token }}{% for m in messages %}[{{ m.role }}] {{ m.content }}{{ eos_token }}{% endfor %}"


class Family(NamedTuple):
    name: str
    build: Callable[[], tokenizers.Tokenizer]
    bos: str | None
    eos: str
    adds_bos: bool

    def write(self, folder: Path) -> None:
        """Put tokenizer.json and tokenizer_config.json into the folder."""
        wrap: Any = transformers.PreTrainedTokenizerFast
        wrap(tokenizer_object=self.build(), bos_token=self.bos, eos_token=self.eos).save_pretrained(folder)


def byte_level(pattern: str, special: list[str], composed: bool) -> tokenizers.Tokenizer:
    built = tokenizers.Tokenizer(models.BPE(ignore_merges=not composed))
    if composed:
        built.normalizer = normalizers.NFC()
    built.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(pattern), "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    built.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    built.train_from_iterator(
        CORPUS * 3, trainers.BpeTrainer(vocab_size=400, initial_alphabet=alphabet, show_progress=False)
    )
    built.add_special_tokens([AddedToken(text, special=True) for text in special])
    built.add_tokens([AddedToken("<tool>", normalized=False), AddedToken("</tool>", normalized=False)])
    return built


def llama3() -> tokenizers.Tokenizer:
    built = byte_level(LLAMA3, ["<|begin|>", "<|eot_id|>"], composed=False)
    begin = built.token_to_id("<|begin|>")
    built.post_processor = processors.TemplateProcessing("<|begin|> $A", special_tokens=[("<|begin|>", begin)])
    return built


def qwen() -> tokenizers.Tokenizer:
    return byte_level(LLAMA3.replace("{1,3}", ""), ["<|im_start|>", "<|im_end|>"], composed=True)


def sentence_pieces(first_only: bool) -> tokenizers.Tokenizer:
    special = ["<unk>", "<s>", "</s>"]
    built = tokenizers.Tokenizer(models.BPE(unk_token="<unk>", byte_fallback=True, fuse_unk=True))
    built.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first", split=True)
    alphabet = [f"<0x{byte:02X}>" for byte in range(256)]
    trainer = trainers.BpeTrainer(vocab_size=500, special_tokens=[*special, *alphabet], show_progress=False)
    built.train_from_iterator(CORPUS * 3, trainer)
    described = json.loads(built.to_str())
    # Bytes are ordinary tokens: only in training are they kept whole by being special.
    described["added_tokens"] = [token for token in described["added_tokens"] if token["content"] in special]
    built = tokenizers.Tokenizer.from_str(json.dumps(described))
    if first_only:
        built.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first", split=False)
    else:
        built.pre_tokenizer = None
        built.normalizer = normalizers.Sequence([normalizers.Prepend("\u2581"), normalizers.Replace(" ", "\u2581")])
    built.decoder = decoders.Sequence(
        [decoders.Replace("\u2581", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    built.post_processor = processors.TemplateProcessing("<s> $A", special_tokens=[("<s>", 1)])
    return built


FAMILIES = (
    Family("llama3", llama3, "<|begin|>", "<|eot_id|>", True),
    Family("qwen", qwen, None, "<|im_end|>", False),
    Family("mistral", lambda: sentence_pieces(True), "<s>", "</s>", True),
    Family("llama2", lambda: sentence_pieces(False), "<s>", "</s>", True),
)


class Folder(NamedTuple):
    path: Path
    family: Family

    @property
    def tokenizer(self) -> Tokenizer:
        with open_model_file(self.path) as file:
            return Tokenizer.of(file)

    def change(self, name: str, **changes: Any) -> None:
        path = self.path / name
        known = json.loads(path.read_text()) if path.exists() else {}
        path.write_text(json.dumps({**known, **changes}))


def folder_of(family: Family, weights: Path, path: Path) -> Folder:
    shutil.copytree(weights, path)
    family.write(path)
    return Folder(path, family)
