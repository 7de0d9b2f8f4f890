"""A folder's tokenizer gives the ids of `transformers`, and its template, ends and sampling are the folder's."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import tokenizers
import transformers
from ops.checkpoints import Checkpoint, Reference
from tokenizers import AddedToken, Regex, decoders, models, normalizers, pre_tokenizers, processors, trainers

from headrace.ops.weights.files import open_model_file
from headrace.ops.weights.gguf import BadModelFile
from headrace.server.chat import Chat, TextModel, own_template
from headrace.server.tokenizer import BadTokenizer, Tokenizer

VOCAB = 700
CORPUS = [
    "The quick brown fox jumps over the lazy dog's 1234 tails.  Is it?\n\n",
    "Größe, naïve, 你好 мир\t12",
    "<s> a</s>",
]
ODD = [
    *(
        "",
        " ",
        "  ",
        "\n",
        "\r\n\r\n",
        "a",
        " a",
        "  a",
        "a ",
        "The lazy dog",
        " The\n\n\n  lazy   dog  ",
        "1234567 12 1",
    ),
    *(
        "don't DON'T I'll",
        "¿Qué?",
        "e\u0301 \u00e9",
        "你好，世界。",
        "👩‍👩‍👧 🏳️‍🌈",
        "\u0000\u0007",
        "\u2581x \u2581",
        "fox\u00a0jumps",
    ),
    *("<tool>quick</tool>", "a<tool>", "\U0010ffff1", "\u202eabc", "x" * 300, "The lazy dog's tails. " * 40),
]
LLAMA3 = "|".join(
    (
        r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}",
        r" ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+",
    )
)


class Family(NamedTuple):
    name: str
    build: Callable[[], tokenizers.Tokenizer]
    bos: str | None
    eos: str
    adds_bos: bool


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
TEMPLATE = "{{ bos_token }}{% for m in messages %}[{{ m.role }}] {{ m.content }}{{ eos_token }}{% endfor %}"


@pytest.fixture(scope="session")
def weights(tmp_path_factory: pytest.TempPathFactory) -> Path:
    tiny = Checkpoint("tiny", "LlamaForCausalLM", {"vocab_size": VOCAB, "num_hidden_layers": 1})
    return Reference(tiny, tmp_path_factory.mktemp("text") / "tiny").folder


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
    wrap: Any = transformers.PreTrainedTokenizerFast
    wrapped = wrap(tokenizer_object=family.build(), bos_token=family.bos, eos_token=family.eos)
    wrapped.save_pretrained(path)
    return Folder(path, family)


@pytest.fixture(scope="module", params=FAMILIES, ids=lambda family: family.name)
def folder(request: pytest.FixtureRequest, weights: Path, tmp_path_factory: pytest.TempPathFactory) -> Folder:
    return folder_of(request.param, weights, tmp_path_factory.mktemp("family") / "model")


@pytest.fixture
def llama(weights: Path, tmp_path: Path) -> Folder:
    """One to change."""
    return folder_of(FAMILIES[0], weights, tmp_path / "model")


def test_ids_of_odd_strings_are_those_of_transformers(folder: Folder) -> None:
    theirs = transformers.PreTrainedTokenizerFast.from_pretrained(folder.path)
    ours = folder.tokenizer

    assert [ours.encode(text).tolist() for text in ODD] == [
        theirs.encode(text, add_special_tokens=False) for text in ODD
    ]


def test_ids_with_control_tokens_are_those_of_transformers(folder: Folder) -> None:
    theirs = transformers.PreTrainedTokenizerFast.from_pretrained(folder.path)
    eos = folder.family.eos
    texts = [f"{eos}", f"{eos}The fox", f"The fox{eos}jumps {eos} over", f" {eos}{eos}\n{eos}"]

    assert [folder.tokenizer.encode_with_control(text).tolist() for text in texts] == [
        theirs.encode(text, add_special_tokens=False) for text in texts
    ]


def test_no_text_of_a_client_becomes_a_control_token(folder: Folder) -> None:
    tokenizer = folder.tokenizer
    for text in [*tokenizer.control.ids, "\U0010ffff1", "\U0010ffff2"]:
        assert not any(tokenizer.is_control(index) for index in tokenizer.encode(f"a{text}b").tolist()), text


def test_a_prompt_begins_as_with_transformers(folder: Folder) -> None:
    theirs = transformers.PreTrainedTokenizerFast.from_pretrained(folder.path)
    tokenizer = folder.tokenizer

    begun = [tokenizer.bos_id] if tokenizer.add_bos else []

    assert tokenizer.add_bos == folder.family.adds_bos
    assert [*begun, *tokenizer.encode("The fox").tolist()] == theirs.encode("The fox")


def test_text_comes_back_from_ids(folder: Folder) -> None:
    for text in ["The lazy dog's", "你好 👩‍👩‍👧", "12 \n34"]:
        assert folder.tokenizer.decode(folder.tokenizer.encode(text).tolist()).lstrip(" ") == text


def test_long_text_is_cut_where_nothing_changes(llama: Folder) -> None:
    tokenizer = llama.tokenizer
    text = "The lazy dog's  1234 tails.\n " * 1500

    assert len(list(tokenizer.pieces([text]))) > 2
    assert tokenizer.encode(text).tolist() == llama.family.build().encode(text, add_special_tokens=False).ids


def test_the_ends_of_all_files_end_a_text(llama: Folder) -> None:
    llama.change("config.json", eos_token_id=5)
    llama.change("generation_config.json", eos_token_id=[7, 9])

    eot = llama.family.build().token_to_id("<|eot_id|>")
    assert llama.tokenizer.stop_ids == (5, 7, 9, eot)


def test_the_template_is_the_folders_and_control_tokens_come_from_it_alone(llama: Folder) -> None:
    (llama.path / "chat_template.jinja").write_text(TEMPLATE)
    model = TextModel.load(llama.path)
    chat = Chat([{"role": "user", "content": "fox<|eot_id|>"}])

    ids = model.required_template().encode(chat).tolist()

    controls = [index for index in ids if model.tokenizer.is_control(index)]
    assert controls == [model.tokenizer.bos_id, model.tokenizer.eos_id]
    assert model.tokenizer.decode(ids) == "[user] fox<|eot_id|>"


@pytest.mark.parametrize(
    "said", [TEMPLATE, [{"name": "tool_use", "template": "no"}, {"name": "default", "template": TEMPLATE}]]
)
def test_the_template_may_stand_in_the_tokenizers_config(llama: Folder, said: object) -> None:
    llama.change("tokenizer_config.json", chat_template=said)
    with open_model_file(llama.path) as file:
        assert own_template(file) == TEMPLATE


@pytest.mark.parametrize(
    ("change", "because"),
    [
        (lambda folder: (folder.path / "tokenizer.json").unlink(), "has no tokenizer.json. The folder is incomplete"),
        (lambda folder: only_sentence_piece(folder), "has no tokenizer.json. Make one of its tokenizer.model"),
        (lambda folder: folder.change("tokenizer.json", model={"type": "Unigram"}), "'Unigram'. Supported: 'BPE'"),
        (lambda folder: folder.change("tokenizer.json", decoder={"type": "WordPiece"}), "'WordPiece'.*not supported"),
        (lambda folder: folder.change("tokenizer.json", model={"type": "BPE"}), "has no vocabulary"),
        (lambda folder: folder.change("tokenizer.json", added_tokens=[{"id": 700, "content": "x"}]), "the id 700, but"),
        (lambda folder: folder.change("tokenizer.json", added_tokens=[{"id": "1"}]), "added_tokens that can't be read"),
        (
            lambda folder: folder.change("generation_config.json", eos_token_id=700),
            "eos_token_id is 700, but the model",
        ),
        (lambda folder: folder.change("generation_config.json", eos_token_id="x"), "must be an id, or a list of ids"),
        (lambda folder: (folder.path / "tokenizer_config.json").write_text("{"), "tokenizer_config.json' is not JSON"),
    ],
)
def test_a_tokenizer_that_is_missing_or_wrong_is_refused(
    llama: Folder, change: Callable[[Folder], Any], because: str
) -> None:
    change(llama)
    with pytest.raises((BadTokenizer, BadModelFile), match=because):
        assert llama.tokenizer


def only_sentence_piece(folder: Folder) -> None:
    (folder.path / "tokenizer.json").rename(folder.path / "tokenizer.model")
