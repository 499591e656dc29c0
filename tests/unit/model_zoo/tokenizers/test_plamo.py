"""The tokenizer of PLaMo 2 and 3, against its authors' algorithm."""

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from model_zoo.convert.configuration import Configuration
from model_zoo.convert.vocabularies.choice import tokenizer_keys
from model_zoo.convert.vocabularies.files import TokenizerFiles
from model_zoo.tokenizers.tokenizer import Tokenizer, load_tokenizer
from runtime.errors import ModelFileError
from tests.plamo_vocabulary import PIECES, ROWS, SETTINGS, TEXTS, authors_ids


def converted(folder: Path, lines: str, *, rows: int) -> dict[str, Any]:
    (folder / "tokenizer.jsonl").write_text(lines, encoding="utf-8")
    (folder / "tokenizer_config.json").write_text(json.dumps(SETTINGS))
    files = TokenizerFiles(folder, Configuration({}, path=folder / "config.json"))
    return tokenizer_keys(files, architecture="plamo2", rows=rows, kind=None)


@pytest.fixture(scope="module")
def keys(tmp_path_factory) -> dict[str, Any]:
    lines = "".join(f"{json.dumps([*row, 0, 0], ensure_ascii=False)}\n" for row in ROWS)
    return converted(tmp_path_factory.mktemp("plamo"), lines, rows=len(ROWS) + 3)


@pytest.fixture(scope="module")
def tokenizer(keys) -> Tokenizer:
    return load_tokenizer(keys, architecture="plamo2")


@pytest.mark.parametrize("text", TEXTS)
def test_texts_become_the_tokens_of_the_authors_tokenizer(tokenizer, text) -> None:
    assert tokenizer.encode(text) == authors_ids(text)
    assert tokenizer.decode(tokenizer.encode(text)) == text


@given(
    text=st.text(max_size=40)
    | st.lists(st.sampled_from([*PIECES, "京", "🏽"]), max_size=12).map("".join)
)
def test_any_text_becomes_the_tokens_of_the_authors_tokenizer(tokenizer, text) -> None:
    assert tokenizer.encode(text) == authors_ids(text)


def test_a_text_contains_control_tokens_on_request_only(tokenizer) -> None:
    text = "<|plamo:op|>the"
    op = tokenizer.id_of("<|plamo:op|>")
    assert tokenizer.encode(text, parse_special=True) == [op, *authors_ids("the")]
    assert op not in tokenizer.encode(text) and tokenizer.decode(tokenizer.encode(text)) == text


def test_answers_end_where_the_next_message_begins(tokenizer, keys) -> None:
    """An end tag of HTML, which is an ordinary token, does not end them. Early files of llama.cpp
    state the beginning of a message as EOS."""
    early = load_tokenizer(
        {key: keys[key] for key in keys if key != "tokenizer.ggml.eot_token_id"}
        | {"tokenizer.ggml.eos_token_id": tokenizer.id_of("<|plamo:op|>")},
        architecture="plamo2",
    )
    for each in (tokenizer, early):
        ends = {each.token_text(token) for token in each.end_tokens}
        assert ends == {"<|plamo:eos|>", "<|plamo:op|>"}
    assert keys["tokenizer.ggml.eot_token_id"] == tokenizer.id_of("<|plamo:op|>")
    assert tokenizer.add_bos and tokenizer.token_text(tokenizer.bos_id or 0) == "<|plamo:bos|>"


def test_roles_are_found_without_their_keys(keys) -> None:
    """As llama.cpp's converter leaves out whether texts begin with BOS, they do not."""
    roles = ("bos_token_id", "eos_token_id", "unknown_token_id", "add_bos_token")
    lacking = {key: keys[key] for key in keys if key.rpartition(".")[2] not in roles}
    found = load_tokenizer(lacking, architecture="plamo2")
    assert (found.bos_id, found.eos_id) == (1, 2) and not found.add_bos


@pytest.mark.parametrize("score", [float("-inf"), -1e300, -1e4])
def test_a_token_with_an_impossible_score_is_never_used(keys, score) -> None:
    scores = list(keys["tokenizer.ggml.scores"])
    scores[len(ROWS) - len(PIECES) + list(PIECES).index("東京")] = score
    changed = load_tokenizer(keys | {"tokenizer.ggml.scores": scores}, architecture="plamo2")
    assert changed.encode("東京") == [*authors_ids("東"), *authors_ids("京")]


@pytest.mark.parametrize(
    "lines, message",
    [
        ("", "has 0 tokens"),
        ("[\n", "'\\[' as a token"),
        ('["a"]\n', "as a token with its score"),
        ('[1, 2.0, "NORMAL"]', "as a token with its score"),
    ],
)
def test_a_damaged_list_of_tokens_is_refused(tmp_path, lines, message) -> None:
    with pytest.raises(ModelFileError, match=message):
        converted(tmp_path, lines, rows=4)


def test_a_vocabulary_without_a_byte_is_refused(keys) -> None:
    types = [2 if kind == 6 else kind for kind in keys["tokenizer.ggml.token_type"]]
    with pytest.raises(ModelFileError, match="lacks the token of a byte"):
        load_tokenizer(keys | {"tokenizer.ggml.token_type": types}, architecture="plamo2")
