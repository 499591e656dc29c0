"""The search for special tokens in texts, with few and with many of them."""

import re
from unittest import mock

import pytest
from hypothesis import given
from hypothesis import strategies as st

from model_zoo.tokenizers import specials
from model_zoo.tokenizers.specials import SpecialTexts, any_of
from model_zoo.tokenizers.tokenizer import load_tokenizer
from tests.unit.model_zoo.tokenizers.tiny_vocabulary import CONTROL, byte_level_metadata


def test_any_of_matches_the_longest_of_many_texts_and_nothing_else() -> None:
    texts = ["<a>", "<ab>", "<abc>", "▁", "▁▁", "▁▁▁", "a.b", "(", "<unused1>", "<unused10>"]
    expression = any_of(texts)
    assert expression is not None
    pattern = re.compile(expression)
    for text in texts:
        assert pattern.match(text + "|")[0] == text
    assert pattern.search("axb <a < abc ) unused1") is None


def test_special_tokens_with_long_common_prefixes_are_found() -> None:
    texts = ["<" + "a" * n for n in range(1, 1500)]
    metadata = byte_level_metadata(dict.fromkeys(texts, CONTROL))
    tokenizer = load_tokenizer(metadata, architecture="qwen2")
    for text in (texts[0], texts[77], texts[-1]):
        (token,) = tokenizer.encode(text, parse_special=True)
        assert tokenizer.token_text(token) == text


@pytest.mark.parametrize(
    "texts",
    [
        ["<" * (n % 100 + 1) + str(n) for n in range(5000)],
        ["<" * 300_000 + "x", "<" * 300_000 + "y", "<7"],
        [chr(0x4E00 + n) + "x" for n in range(5000)],
        ["a" * n for n in range(2, 1500)],
    ],
    ids=["many runs", "long", "wide", "deep"],
)
def test_no_set_of_special_tokens_makes_splitting_slow(texts: list[str]) -> None:
    """A search for one text after the other would take hours."""
    assert any_of(texts) is None
    cutter = SpecialTexts(control={text: n for n, text in enumerate(texts)}, user_defined={})
    for text in (texts[0][0] * 50_000, f"é{texts[-1]}\0{texts[0]}b"):
        parts = cutter.cut(text, parse_special=True)
        assert "".join(p if isinstance(p, str) else texts[p] for p in parts) == text
    assert [part for part in parts if isinstance(part, int)] == [len(texts) - 1, 0]


@given(
    texts=st.lists(st.text("<ab|\n▁é", min_size=1, max_size=6), min_size=1, max_size=12),
    text=st.text("<ab|\n▁é", max_size=40),
)
def test_both_ways_to_find_special_tokens_agree(texts: list[str], text: str) -> None:
    with mock.patch.object(specials, "_MAX_STEPS", 0):
        slow = list(specials.finder(texts)(text))
    assert list(specials.finder(texts)(text)) == slow
