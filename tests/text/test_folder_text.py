"""A folder's tokenizer gives the ids of `transformers`, and its template, ends and sampling are the folder's."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import transformers
from ops.checkpoints import Checkpoint, Reference
from text.folders import FAMILIES, TEMPLATE, VOCAB, Folder, folder_of

from headrace.ops.weights.files import open_model_file
from headrace.ops.weights.gguf import BadModelFile
from headrace.server.chat import Chat, TextModel, own_template
from headrace.server.tokenizer import BadText, BadTokenizer

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


@pytest.fixture(scope="session")
def weights(tmp_path_factory: pytest.TempPathFactory) -> Path:
    tiny = Checkpoint("tiny", "LlamaForCausalLM", {"vocab_size": VOCAB, "num_hidden_layers": 1})
    return Reference(tiny, tmp_path_factory.mktemp("text") / "tiny").folder


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
        (
            lambda folder: folder.change("tokenizer_config.json", auto_map={"AutoTokenizer": ["own.Own", None]}),
            "tokenizer_config.json names code of its own",
        ),
        (lambda folder: (folder.path / "tokenizer_config.json").write_text("{"), "tokenizer_config.json' is not JSON"),
        (lambda folder: change_model(folder, dropout=0.1), "has dropout '0.1': not supported"),
        (lambda folder: change_model(folder, continuing_subword_prefix="##"), "has continuing_subword_prefix '##'"),
        (lambda folder: change_model(folder, merges=[[1, 2]]), "has merges that can't be read"),
        (lambda folder: change_model(folder, merges={"a": "b"}), "has merges that can't be read"),
        (
            lambda folder: change_model(folder, vocab={"a": 1, "b": 1}),
            "gives the text 'b' more than one id, or its id 1",
        ),
        (
            lambda folder: folder.change("tokenizer.json", added_tokens=[{"id": 3, "content": "xx"}]),
            "the text 'xx' more than one id, or its id 3 more than one text",
        ),
        (lambda folder: folder.change("tokenizer.json", decoder={"type": ["ByteLevel"]}), "not supported"),
        (
            lambda folder: folder.change("tokenizer.json", decoder={"type": "Sequence", "decoders": 7}),
            "a sequence without a list of decoders",
        ),
        (
            lambda folder: folder.change(
                "tokenizer.json", decoder={"type": "Replace", "pattern": {"String": "a"}, "content": "b"}
            ),
            "turns tokens into text by .'Replace'., in a way that is not supported",
        ),
        (
            lambda folder: folder.change("tokenizer.json", post_processor={"type": "BertProcessing"}),
            "puts something else around a text than bos_token before it",
        ),
        (lambda folder: put_around(folder, None, "<|eot_id|>"), "puts something else around a text"),
        (lambda folder: put_around(folder, "<|eot_id|>", None), "puts something else around a text"),
        (lambda folder: folder.change("tokenizer_config.json", add_eos_token=True), "add_eos_token.*set it to false"),
        (
            lambda folder: folder.change("tokenizer_config.json", bos_token="<no>"),
            "bos_token of .* is '<no>', which tok",
        ),
        (
            lambda folder: folder.change("tokenizer_config.json", eos_token={"content": ["x"]}),
            "eos_token of its tokenizer_config.json is .*which tokenizer.json does not have",
        ),
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


def change_model(folder: Folder, **changes: Any) -> None:
    described = json.loads((folder.path / "tokenizer.json").read_text())
    folder.change("tokenizer.json", model={**described["model"], **changes})


def put_around(folder: Folder, before: str | None, behind: str | None) -> None:
    around = [None if text is None else {"SpecialToken": {"id": text, "type_id": 0}} for text in (before, behind)]
    single = [piece for piece in (around[0], {"Sequence": {"id": "A", "type_id": 0}}, around[1]) if piece]
    folder.change("tokenizer.json", post_processor={"type": "TemplateProcessing", "single": single, "pair": []})


def test_a_text_that_the_pattern_of_words_gives_up_on_is_refused(llama: Folder) -> None:
    hard = {"type": "Split", "pattern": {"Regex": "(a+)+$"}, "behavior": "Isolated", "invert": False}
    llama.change("tokenizer.json", pre_tokenizer=hard)

    assert len(llama.tokenizer.encode("ab"))
    with pytest.raises(BadText, match=r"can't cut the text into words: .*retry-limit"):
        llama.tokenizer.encode("a" * 30 + "b")


def test_a_template_that_has_no_end_is_not_read_to_it(llama: Folder) -> None:
    (llama.path / "chat_template.jinja").symlink_to("/dev/zero")
    with pytest.raises(BadModelFile, match=r"chat_template.jinja' can't be read: not a regular file"):
        TextModel.load(llama.path)
