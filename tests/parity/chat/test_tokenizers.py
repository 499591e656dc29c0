"""Tokenizers against published vectors and against each family's own library."""

from collections.abc import Callable, Mapping
from functools import cache, partial
from unicodedata import normalize

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import (
    CohereTokenizer,
    GPT2Tokenizer,
    GPTNeoXTokenizer,
    LlamaTokenizer,
    Qwen2Tokenizer,
    Qwen3_5Tokenizer,
)
from transformers.convert_slow_tokenizer import TikTokenConverter, bytes_to_unicode
from transformers.tokenization_utils_base import generate_merges

from model_zoo.tokenizers.tokenizer import Tokenizer, load_tokenizer
from tests.parity.chat.random_texts import random_texts
from tests.reference_data import reference_data, vocabulary_metadata

NAMES = ("gpt-2", "llama-bpe", "llama-spm", "qwen2")
BYTE_LEVEL = ("gpt-2", "llama-bpe", "qwen2")
# Unicode's normal form C has fewer characters, and ASCII characters in place of some others.
DECOMPOSED = [
    *(normalize("NFD", text) for text in ("Tiếng Việt, café à Zürich", "한국어", "ガ")),
    "a\u0323\u0307 and a\u0307\u0323",
    "\u212a \u1fef \u037e",
]
Encode = Callable[[str], list[int]]


@cache
def tokenizer(name: str) -> Tokenizer:
    metadata = vocabulary_metadata(name)
    return load_tokenizer(metadata, architecture=metadata["general.architecture"])


def vectors(name: str) -> list[tuple[str, list[int]]]:
    path = reference_data(f"vocab/ggml-vocab-{name}.gguf.inp")
    with path.open(encoding="utf-8", newline="") as file:
        texts = file.read().split("\n__ggml_vocab_test__\n")
    lines = path.with_suffix(".out").read_text(encoding="utf-8").split("\n")
    pairs = zip(texts, lines, strict=False)  # both files end in an empty entry
    return [(text, [int(token) for token in line.split()]) for text, line in pairs]


@pytest.mark.parametrize("name", NAMES)
def test_published_vectors_are_met_exactly(name: str) -> None:
    pairs = vectors(name)
    assert len(pairs) >= 46
    for text, expected in pairs:
        assert tokenizer(name).encode(text) == expected, text


class RanksConverter(TikTokenConverter):
    """Llama 3 is published as byte sequences with ranks; the library derives the merges itself."""

    @staticmethod
    def load_tiktoken_bpe(tiktoken_url: str) -> dict[bytes, int]:
        characters = {character: byte for byte, character in bytes_to_unicode().items()}
        metadata = vocabulary_metadata("llama-bpe")
        types = metadata["tokenizer.ggml.token_type"]
        return {
            bytes(characters[character] for character in text): rank
            for rank, text in enumerate(metadata["tokenizer.ggml.tokens"])
            if types[rank] == 1
        }


def byte_level(name: str, make: type) -> Encode:
    metadata = vocabulary_metadata(name)
    ids = {text: i for i, text in enumerate(metadata["tokenizer.ggml.tokens"])}
    merges = [tuple(merge.split(" ")) for merge in metadata["tokenizer.ggml.merges"]]
    return make(vocab=ids, merges=merges).encode


def merges_from_ranks() -> Encode:
    reference = RanksConverter("").converted()
    return lambda text: reference.encode(text).ids


def sentencepiece() -> Encode:
    metadata = vocabulary_metadata("llama-spm")
    tokens, scores = metadata["tokenizer.ggml.tokens"], metadata["tokenizer.ggml.scores"]
    types = metadata["tokenizer.ggml.token_type"]
    ids = {text: i for i, text in enumerate(tokens)}
    skipped = [text for text, kind in zip(tokens, types, strict=True) if kind != 1]
    merges = generate_merges(ids, dict(zip(tokens, scores, strict=True)), skipped)
    reference = LlamaTokenizer(vocab=ids, merges=merges, legacy=False)
    return lambda text: reference.encode(text, add_special_tokens=False)


# Makes the reference, and what is done to random texts for it.
REFERENCES: Mapping[str, tuple[Callable[[], Encode], Callable[[str], str]]] = {
    "gpt-2": (partial(byte_level, "gpt-2", GPT2Tokenizer), str),
    "llama-bpe": (merges_from_ranks, str),
    # The class gives text that starts with a space no further one.
    "llama-spm": (sentencepiece, "x".__add__),
    "qwen2": (partial(byte_level, "qwen2", Qwen2Tokenizer), str),
}


@pytest.mark.parametrize("name", NAMES)
def test_ids_are_those_of_the_tokenizer_class_of_the_family(name: str) -> None:
    make, prepared = REFERENCES[name]
    encode = make()
    for text in map(prepared, random_texts(NAMES.index(name), 400)):
        assert tokenizer(name).encode(text) == encode(text), text


CLASSES = {
    "qwen2": Qwen2Tokenizer,
    "qwen35": Qwen3_5Tokenizer,
    "command-r": CohereTokenizer,
    "olmo": GPTNeoXTokenizer,
    "mpt": GPTNeoXTokenizer,
    "gpt-2": GPT2Tokenizer,
}


@pytest.mark.parametrize("name", CLASSES)
def test_decomposed_text_is_composed_where_the_class_of_the_family_does_so(name: str) -> None:
    metadata = {**vocabulary_metadata("gpt-2"), "tokenizer.ggml.pre": name}
    subject = load_tokenizer(metadata, architecture="llama")
    encode = byte_level("gpt-2", CLASSES[name])
    for text in DECOMPOSED:
        assert subject.encode(text) == encode(text, add_special_tokens=False), text
    whole = "\n".join(DECOMPOSED)
    assert subject.decode(subject.encode(whole, exact=True)) == whole


@pytest.mark.parametrize("name", BYTE_LEVEL)
def test_bytes_of_the_tokens_are_the_bytes_of_the_text(name: str) -> None:
    subject = tokenizer(name)

    @settings(max_examples=300)
    @given(st.text(max_size=200))
    def check(text: str) -> None:
        assert b"".join(map(subject.token_bytes, subject.encode(text, exact=True))) == text.encode()

    check()
    for text in random_texts(5, 200):
        tokens = subject.encode(text, exact=True)
        assert b"".join(map(subject.token_bytes, tokens)) == text.encode()


def test_sentencepiece_bytes_are_the_text_behind_its_prefix_space() -> None:
    subject = tokenizer("llama-spm")

    @settings(max_examples=300)
    @given(st.text(alphabet=st.characters(exclude_categories=("Cs",), exclude_characters="▁")))
    def check(text: str) -> None:
        expected = b" " + text.encode() if text else b""
        assert b"".join(map(subject.token_bytes, subject.encode(text))) == expected

    check()


@pytest.mark.parametrize("name", NAMES)
def test_special_texts_are_tokens_only_when_asked_for(name: str) -> None:
    subject = tokenizer(name)
    for text, token in subject.vocabulary.control.items():
        assert token not in subject.encode(f"a {text} b")
        assert token in subject.encode(f"a {text} b", parse_special=True)
