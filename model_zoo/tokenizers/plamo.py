"""The Unigram tokenizer of PLaMo 2 and 3, with the `tokenizers` library."""

from collections.abc import Mapping
from typing import Any

from tokenizers import Tokenizer as NativeTokenizer
from tokenizers.models import Unigram as NativeUnigram

from model_zoo.tokenizers.marked_space import byte_of
from model_zoo.tokenizers.vocabulary import TokenType, Vocabulary, token_scores
from runtime.errors import ModelFileError

# Scores are counted in steps of 1 / this, as in the authors' tokenizer.
_STEPS = 10_000
# The score of a character that is no token and becomes the tokens of its bytes.
_AS_BYTES = -1000 * _STEPS
# What the library subtracts from the lowest score for such characters.
_PENALTY = 10
_IN_TEXT = (TokenType.NORMAL, TokenType.USER_DEFINED)


class PlamoUnigram:
    """Splits a whole text into the tokens with the highest sum of scores; of equal ones, into those
    whose first token is the longest.

    The library prefers a long last token, so it gets tokens and texts backwards.
    """

    def __init__(self, metadata: Mapping[str, Any], vocabulary: Vocabulary) -> None:
        scores = token_scores(metadata, len(vocabulary.tokens))
        # The first row is for characters that are no tokens, wherever its own text occurs.
        rows, self._ids = [("\uffff", float(_AS_BYTES + _PENALTY))], [-1]
        for token, (text, kind) in enumerate(zip(vocabulary.tokens, vocabulary.types, strict=True)):
            score = _rounded(scores[token])
            if kind in _IN_TEXT and text and text not in vocabulary.control and score > rows[0][1]:
                rows.append((text[::-1], score))
                self._ids.append(token)
        self._bytes = _tokens_of_bytes(vocabulary)
        self._native = NativeTokenizer(NativeUnigram(rows, unk_id=0, byte_fallback=False))

    def surface(self, text: str) -> str:
        return text

    def plain(self, surface: str) -> str:
        return surface

    def encode(self, text: str, *, opens: bool) -> list[int]:
        found = self._native.encode(text[::-1], add_special_tokens=False)
        ids: list[int] = []
        for row, (begin, end) in zip(found.ids[::-1], found.offsets[::-1], strict=True):
            if row:
                ids.append(self._ids[row])
            else:
                piece = text[len(text) - end : len(text) - begin]
                ids += (self._bytes[value] for value in piece.encode())
        return ids

    def token_bytes(self, token: str) -> bytes:
        value = byte_of(token)
        return token.encode(errors="replace") if value is None else bytes([value])


def _tokens_of_bytes(vocabulary: Vocabulary) -> list[int]:
    rows = enumerate(zip(vocabulary.tokens, vocabulary.types, strict=True))
    found = {byte_of(text): id for id, (text, kind) in rows if kind == TokenType.BYTE}
    if not found.keys() >= set(range(256)):
        raise ModelFileError("The vocabulary lacks the token of a byte.")
    return [found[value] for value in range(256)]


def _rounded(score: float) -> float:
    """In steps; -inf for a score without a number of steps."""
    try:
        return float(round(score * _STEPS))
    except (OverflowError, ValueError):
        return float("-inf")
