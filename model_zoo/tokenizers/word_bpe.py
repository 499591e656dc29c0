"""BPE of characters within words with the `tokenizers` library: Jina's Chinese embedding model."""

from collections.abc import Mapping
from typing import Any

from tokenizers import Tokenizer as NativeTokenizer
from tokenizers.normalizers import Lowercase
from tokenizers.pre_tokenizers import Whitespace

from model_zoo.tokenizers.byte_level import merging_model
from model_zoo.tokenizers.vocabulary import Vocabulary, flag


class WordBPE:
    """Splits lowercased text into words and runs of punctuation, without the white space between
    them, and merges their characters; unknown ones become the unknown token."""

    def __init__(self, metadata: Mapping[str, Any], vocabulary: Vocabulary) -> None:
        unknown = vocabulary.unknown_id
        text = None if unknown is None else vocabulary.tokens[unknown]
        self._native = NativeTokenizer(merging_model(metadata, vocabulary, unk_token=text))
        # The first converters of llama.cpp do not state it.
        if flag(metadata, "normalizer.lowercase") is not False:
            self._native.normalizer = Lowercase()
        self._native.pre_tokenizer = Whitespace()

    def surface(self, text: str) -> str:
        return text

    def plain(self, surface: str) -> str:
        return surface

    def encode(self, text: str, *, opens: bool) -> list[int]:
        return self._native.encode_batch_fast([text], add_special_tokens=False)[0].ids

    def token_bytes(self, token: str) -> bytes:
        return token.encode(errors="replace")
