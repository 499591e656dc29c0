"""RWKV's World tokenizer: conversion, texts, and the template of files that name one."""

from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from model_zoo.chat.messages import Message
from model_zoo.chat.template_choice import choose_template
from model_zoo.convert.configuration import Configuration
from model_zoo.convert.vocabularies.choice import tokenizer_keys
from model_zoo.convert.vocabularies.files import TokenizerFiles
from model_zoo.tokenizers.tokenizer import Tokenizer, load_tokenizer
from runtime.errors import ModelFileError
from tests.chat_templates import encode_chat
from tests.world_vocabulary import PIECES, TEXTS, authors_ids, lines


def converted(folder: Path, text: str) -> dict[str, Any]:
    """With the ids of Llama's tokens, which published checkpoints state."""
    (folder / "rwkv_vocab_v20230424.txt").write_text(text, encoding="utf-8")
    settings = {"bos_token_id": 1, "eos_token_id": 2}
    files = TokenizerFiles(folder, Configuration(settings, path=folder / "config.json"))
    return tokenizer_keys(files, architecture="rwkv7", rows=len(PIECES) + 4, kind=None)


@pytest.fixture(scope="module")
def keys(tmp_path_factory) -> dict[str, Any]:
    return converted(tmp_path_factory.mktemp("world"), lines())


@pytest.fixture(scope="module")
def tokenizer(keys) -> Tokenizer:
    return load_tokenizer(keys, architecture="rwkv7")


@pytest.mark.parametrize("text", TEXTS)
def test_texts_become_the_longest_tokens(tokenizer, text) -> None:
    assert tokenizer.encode(text) == authors_ids(text)
    assert tokenizer.decode(tokenizer.encode(text)) == text


@given(
    text=st.text(max_size=40)
    | st.lists(st.sampled_from(["ab", "abc", "b", "\n", "\\", "'", "東", "京"]), max_size=12).map(
        "".join
    )
)
def test_any_text_becomes_the_longest_tokens(tokenizer, text) -> None:
    assert tokenizer.encode(text) == authors_ids(text)
    assert tokenizer.decode(tokenizer.encode(text)) == text


def test_a_paragraph_break_is_text_in_prompts_and_the_end_of_answers(tokenizer, keys) -> None:
    end = 1 + PIECES.index(b"\n\n")
    assert tokenizer.end_tokens == {0, end} and not tokenizer.add_bos
    assert keys["tokenizer.ggml.bos_token_id"] == 0
    assert tokenizer.encode("ab\n\nab", parse_special=True)[1] == end
    assert tokenizer.encode("<s>", parse_special=True) == [0] != tokenizer.encode("<s>")


@pytest.mark.parametrize("stated", [None, "rwkv-world"])
def test_prompts_have_llama_cpps_template_where_files_only_name_it(keys, tokenizer, stated) -> None:
    metadata = keys | ({} if stated is None else {"tokenizer.chat_template": stated})
    chosen = choose_template(metadata, tokenizer, architecture="rwkv7")
    assert chosen is not None and chosen.origin == "fallback (rwkv)"
    roles = ("system", "user", "assistant", "user")
    messages = [Message(role, f" {role} ") for role in roles]
    expected = "System: system\n\nUser: user\n\nAssistant: assistant\n\nUser: user\n\nAssistant:"
    assert encode_chat(chosen.template, tokenizer, messages) == tokenizer.encode(expected)


@pytest.mark.parametrize("text", ["x 'a' 1", "1 'a", "1 'a' 2", "1 3 1", "0 'a' 1", "1 'a' b"])
def test_a_damaged_list_of_tokens_is_refused(tmp_path, text) -> None:
    with pytest.raises(ModelFileError, match="as a token"):
        converted(tmp_path, text)


def test_a_vocabulary_without_a_byte_is_refused(keys) -> None:
    tokens = ["\\xZZ" if text == "\\xff" else text for text in keys["tokenizer.ggml.tokens"]]
    with pytest.raises(ModelFileError, match="lacks the token of a byte"):
        load_tokenizer(keys | {"tokenizer.ggml.tokens": tokens}, architecture="rwkv7")
