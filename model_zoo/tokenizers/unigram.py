"""Unigram, T5's tokenizer, with the `tokenizers` library."""

from base64 import b64decode
from collections.abc import Mapping, Sequence
from math import isfinite
from typing import Any

from tokenizers import Tokenizer as NativeTokenizer
from tokenizers.models import Unigram as NativeUnigram
from tokenizers.normalizers import Precompiled
from tokenizers.pre_tokenizers import Metaspace, WhitespaceSplit
from tokenizers.pre_tokenizers import Sequence as PreTokenizerSequence

from model_zoo.tokenizers.marked_space import SPACE, marked_bytes, without_marks
from model_zoo.tokenizers.vocabulary import TokenType, Vocabulary, flag, token_scores
from runtime.errors import ModelFileError, RequestError

# Types of the tokens that ordinary text may become.
_IN_TEXT = (TokenType.NORMAL, TokenType.BYTE, TokenType.USER_DEFINED)
# Characters that trigger the different kinds of replacements of a normaliser.
_PROBE = "Aﬁ é e\u0301 １ ½ 東 \u200b\u00a0👍"


class Unigram:
    """Splits each word into the tokens with the highest sum of scores."""

    def __init__(self, metadata: Mapping[str, Any], vocabulary: Vocabulary) -> None:
        scores = token_scores(metadata, len(vocabulary.tokens))
        if not all(map(isfinite, scores)):
            raise ModelFileError("`tokenizer.ggml.scores` holds an infinite number.")
        if vocabulary.unknown_id is None:
            raise ModelFileError("A Unigram vocabulary needs `tokenizer.ggml.unknown_token_id`.")
        prefix = flag(metadata, "add_space_prefix")
        scheme = "always" if prefix is None or prefix else "never"
        rows = list(zip(_pieces(vocabulary), map(float, scores), strict=True))
        fallback = vocabulary.types.count(TokenType.BYTE) == 256
        try:
            model = NativeUnigram(rows, vocabulary.unknown_id, byte_fallback=fallback)
            self._native = NativeTokenizer(model)
            charsmap = metadata.get("tokenizer.ggml.precompiled_charsmap")
            if charsmap is not None and len(charsmap):
                self._native.normalizer = Precompiled(_bytes(charsmap))
        except Exception as error:  # the library raises no more specific type
            raise ModelFileError(f"The Unigram vocabulary is damaged: {error}.") from error
        self._native.pre_tokenizer = PreTokenizerSequence(
            [WhitespaceSplit(), Metaspace(replacement=SPACE, prepend_scheme=scheme)]
        )
        try:
            self.encode(_PROBE, opens=True)
        except RequestError as error:
            raise ModelFileError("`tokenizer.ggml.precompiled_charsmap` is damaged.") from error

    def surface(self, text: str) -> str:
        return text

    def plain(self, surface: str) -> str:
        return without_marks(surface)

    def encode(self, text: str, *, opens: bool) -> list[int]:
        try:
            return self._native.encode(text, add_special_tokens=False).ids
        except BaseException as error:
            if type(error).__name__ != "PanicException":
                raise
            raise RequestError("The model's tokenizer fails on this text.") from error

    def token_bytes(self, token: str) -> bytes:
        return marked_bytes(token)


def _bytes(charsmap: Sequence[Any]) -> bytes:
    """The table of characters: stored as bytes, which may be signed, or as characters of base64."""
    if isinstance(charsmap[0], str):
        return b64decode("".join(charsmap), validate=True)
    return bytes(int(byte) + 256 * (byte < 0) for byte in charsmap)


def _pieces(vocabulary: Vocabulary) -> list[str]:
    """The tokens' texts; of those that ordinary text must not become, stand-ins with a space, which
    no word contains."""
    rows = enumerate(zip(vocabulary.tokens, vocabulary.types, strict=True))
    return [
        text if kind in _IN_TEXT and text not in vocabulary.control else f" {token}"
        for token, (text, kind) in rows
    ]
