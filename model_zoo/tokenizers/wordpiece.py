"""WordPiece, BERT's tokenizer, with the `tokenizers` library."""

from collections.abc import Mapping
from typing import Any

from tokenizers import Tokenizer as NativeTokenizer
from tokenizers.models import WordPiece as NativeWordPiece
from tokenizers.normalizers import BertNormalizer
from tokenizers.pre_tokenizers import BertPreTokenizer

from model_zoo.tokenizers.marked_space import SPACE, without_marks
from model_zoo.tokenizers.vocabulary import TokenType, Vocabulary, flag
from runtime.errors import ModelFileError

_CONTINUES = "##"


class WordPiece:
    """Splits words into the longest known pieces; a word with an unknown remainder becomes the
    unknown token."""

    def __init__(self, metadata: Mapping[str, Any], vocabulary: Vocabulary) -> None:
        if vocabulary.unknown_id is None:
            raise ModelFileError("A WordPiece vocabulary needs `tokenizer.ggml.unknown_token_id`.")
        pieces: dict[str, int] = {}
        for token, (text, kind) in enumerate(zip(vocabulary.tokens, vocabulary.types, strict=True)):
            pieces.setdefault(_published(text, kind), token)
        unknown = _published(vocabulary.tokens[vocabulary.unknown_id], TokenType.UNKNOWN)
        pieces[unknown] = vocabulary.unknown_id
        self._native = NativeTokenizer(NativeWordPiece(pieces, unk_token=unknown))
        self._native.normalizer = _normalizer(metadata)
        self._native.pre_tokenizer = BertPreTokenizer()

    def surface(self, text: str) -> str:
        return text

    def plain(self, surface: str) -> str:
        return surface

    def encode(self, text: str, *, opens: bool) -> list[int]:
        return self._native.encode_batch_fast([text], add_special_tokens=False)[0].ids

    def token_bytes(self, token: str) -> bytes:
        return without_marks(token).encode(errors="replace")


def _normalizer(metadata: Mapping[str, Any]) -> BertNormalizer:
    """By default, text is lowercased; accents are stripped if the file says so, or else if text is
    lowercased."""
    lowercase = flag(metadata, "normalizer.lowercase")
    return BertNormalizer(
        lowercase=True if lowercase is None else lowercase,
        strip_accents=flag(metadata, "normalizer.strip_accents"),
    )


def _published(text: str, kind: int) -> str:
    """The piece as in BERT's files. GGUF marks the first piece of a word with ▁, BERT all others
    with ##."""
    special = kind in (TokenType.CONTROL, TokenType.UNKNOWN)
    if special or (text.startswith("[") and text.endswith("]")):
        return text
    opens = text.startswith(SPACE) and text != SPACE
    return text[1:] if opens else _CONTINUES + text
