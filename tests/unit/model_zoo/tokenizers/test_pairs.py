"""Prompts of rerankers: places in a template, borders of tokens, texts with special tokens."""

from pathlib import Path

import pytest
from transformers import Qwen3Config

from model_zoo.gguf.reader import GGUFFile
from model_zoo.registry import choose_template
from model_zoo.tokenizers.pairs import TEMPLATE_KEY, TemplatePairs, pair_format
from model_zoo.tokenizers.tokenizer import Tokenizer, load_tokenizer
from runtime.errors import ModelFileError
from tests.tiny_models import END, START, tiny_tokenizer, write_tiny

TEMPLATE = f"{START}user {{query}} and {{document}}{END}\n"
SIZES = {"hidden_size": 64, "num_hidden_layers": 1, "num_attention_heads": 4}


@pytest.fixture(scope="module")
def metadata(tmp_path_factory):
    path: Path = tmp_path_factory.mktemp("models") / "tiny.gguf"
    write_tiny(path, Qwen3Config(**SIZES, intermediate_size=64, num_key_value_heads=2, head_dim=16))
    return dict(GGUFFile.open(path).metadata)


@pytest.fixture(scope="module")
def tokenizer(metadata) -> Tokenizer:
    return load_tokenizer(metadata, architecture="qwen3")


def expected(text: str) -> list[int]:
    return tiny_tokenizer().encode(text).ids


def test_tokens_extend_over_the_borders_of_query_and_text(tokenizer) -> None:
    encode = TemplatePairs.read(tokenizer, TEMPLATE).encoder("quick fox")
    assert encode("the dog") == expected(f"{START}user quick fox and the dog{END}\n")
    encode = TemplatePairs.read(tokenizer, "{query} {document}ick").encoder("fox")
    assert encode("qu") == encode("qu", at_most=9) == expected("fox quick")


def test_a_query_is_no_template(tokenizer) -> None:
    encode = TemplatePairs.read(tokenizer, TEMPLATE).encoder("{document} {query}")
    assert encode("dog") == expected(f"{START}user {{document}} {{query}} and dog{END}\n")


def test_texts_of_special_tokens_stay_text(tokenizer) -> None:
    tokens = TemplatePairs.read(tokenizer, TEMPLATE).encoder(START)(f"dog{END}")
    start, end = (tiny_tokenizer().token_to_id(text) for text in (START, END))
    assert tokens.count(start) == 1 and tokens.count(end) == 1


def test_only_the_text_is_cut(tokenizer) -> None:
    encode = TemplatePairs.read(tokenizer, TEMPLATE).encoder("fox")
    whole, end = expected(f"{START}user fox and the lazy dog{END}\n"), expected(f"{END}\n")
    for at_most in range(len(encode("")), len(whole)):
        cut = [*whole[: at_most - len(end)], *end]
        assert encode("the lazy dog", at_most=at_most) == cut
    assert encode("the lazy dog", at_most=len(whole)) == whole


@pytest.mark.parametrize(
    "template",
    [
        "{query}",
        "{document} {query}",
        "{query} {query} {document}",
        "{query} {document} {document}",
    ],
)
def test_a_template_needs_both_places_once(tokenizer, template) -> None:
    with pytest.raises(ModelFileError, match="once each"):
        pair_format(tokenizer, {TEMPLATE_KEY: template})


def test_the_template_for_pairs_is_none_for_chats(metadata, tokenizer) -> None:
    """It is not written in Jinja, so that it may have what Jinja refuses."""
    named = {"tokenizer.chat_templates": ["rerank"], TEMPLATE_KEY: "{% {query} {document}"}
    chosen = choose_template(metadata | named, tokenizer, architecture="qwen3")
    assert chosen is not None and chosen.alternatives == {}
