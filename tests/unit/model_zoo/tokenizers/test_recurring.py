"""Texts encoded piece by piece have the same ids as encoded whole."""

import re
from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from model_zoo.gguf.reader import GGUFFile
from model_zoo.tokenizers import recurring
from model_zoo.tokenizers.byte_level import BETWEEN_WORDS, splitter
from model_zoo.tokenizers.pretokenizers import PRE_TOKENIZERS
from model_zoo.tokenizers.recurring import RecurringPieces
from model_zoo.tokenizers.sentencepiece_bpe import SentencePieceBPE
from model_zoo.tokenizers.tokenizer import load_tokenizer
from model_zoo.tokenizers.vocabulary import read_vocabulary
from tests.reference_data import reference_data
from tests.unit.model_zoo.tokenizers.tiny_vocabulary import NORMAL, sentencepiece_metadata

SPACES = re.compile("(?= )")
ROWS = [row for row in dict.fromkeys(PRE_TOKENIZERS.values()) if not row.across_words]
WORDS = [
    "word",
    "I",
    "don't",
    "DON'T",
    "naïve",
    "don",
    "'s",
    "x1",
    "東京",
    "e\u0301",
    "ß",
    "２",
    "42",
]
GLUE = [
    " ",
    "  ",
    " ",
    "\n",
    "\t",
    " \n ",
    ",",
    ", ",
    ". ",
    "-",
    "'",
    " '",
    "_",
    "/",
    "\u3000",
    "🙂",
]
TEXTS = st.lists(
    st.one_of(st.sampled_from(WORDS), st.sampled_from(GLUE), st.text(max_size=3)), max_size=30
).map("".join)


@pytest.mark.parametrize("number", range(len(ROWS)))
@given(text=TEXTS)
def test_pre_tokenizers_split_at_a_space_between_letters(number, text) -> None:
    native = splitter(ROWS[number])
    whole = [piece for piece, _ in native.pre_tokenize_str(text)]
    parts = [native.pre_tokenize_str(part) for part in BETWEEN_WORDS.split(text)]
    assert [piece for part in parts for piece, _ in part] == whole


@pytest.mark.parametrize("name", ["gpt-2", "llama-bpe", "qwen2", "llama-spm"])
def test_long_texts_have_the_same_ids_as_without_the_cache(name) -> None:
    file = GGUFFile.open(reference_data(f"vocab/ggml-vocab-{name}.gguf"))
    tokenizer = load_tokenizer(file.metadata, architecture="llama")
    random = Random(5)
    parts = [*WORDS, *GLUE, " ", " ", " "]
    texts = ["".join(random.choices(parts, k=400)) for _ in range(6)]
    for text in [*texts, *texts]:
        assert len(text) > recurring.LONG
        surface = tokenizer._codec.surface(text)
        (whole,) = tokenizer._codec._encode_all([surface])
        assert tokenizer._codec.encode(surface, opens=False) == whole


def test_texts_are_not_split_if_tokens_span_spaces() -> None:
    metadata = sentencepiece_metadata({"▁a": NORMAL, "b▁a": NORMAL})
    codec = SentencePieceBPE(metadata, read_vocabulary(metadata))
    text = "a b a b " * recurring.LONG
    surface = codec.surface(text)
    spanning = metadata["tokenizer.ggml.tokens"].index("b▁a")
    assert spanning in codec.encode(surface, opens=False)
    assert codec.encode(surface, opens=False) == codec._encode_all([surface])[0]


class Counting:
    """An encoder whose ids are code points and which records its calls."""

    def __init__(self) -> None:
        self.asked: list[str] = []

    def __call__(self, texts: list[str]) -> list[list[int]]:
        self.asked += texts
        return [list(map(ord, text)) for text in texts]


def test_recurring_pieces_are_encoded_once() -> None:
    count = Counting()
    pieces = RecurringPieces(SPACES, count)
    text = "one two three " * recurring.LONG
    assert pieces(text) == list(map(ord, text))
    assert sorted(count.asked) == [" ", " one", " three", " two", "one"]
    assert pieces(text) == list(map(ord, text))
    assert len(count.asked) == 5


def test_memory_is_bounded(monkeypatch) -> None:
    monkeypatch.setattr(recurring, "MAX_PIECES", 10)
    count = Counting()
    pieces = RecurringPieces(SPACES, count)
    for begin in range(0, 200, 7):
        text = "".join(
            f" {number:0250d}" if number % 3 else f" {number}"
            for number in range(begin, begin + 30)
        )
        assert pieces(text) == list(map(ord, text))
        assert len(pieces._known) <= 10
        assert all(len(piece) <= recurring.MAX_PIECE for piece in pieces._known)
