"""Tokens of words in sampling parameters: bad words, and DRY's sequence breakers."""

from collections.abc import Iterable
from functools import cache, lru_cache

import numpy as np

from model_zoo.tokenizers.tokenizer import Tokenizer
from runtime.errors import RequestError

_KEPT = 16  # number of cached sets of breakers


class SequenceBreakers:
    """The tokens of a vocabulary by the ASCII characters that they contain."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._bytes = cache(self._all_bytes)
        self.words = lru_cache(_KEPT)(self._words)

    def _words(self, breakers: tuple[str, ...]) -> bytes:
        """Little-endian 32-bit words: bit `token % 32` of word `token // 32` is set for each token
        that contains one of `breakers`. The first call takes a fraction of a second."""
        wanted = frozenset("".join(breakers).encode())
        found = [not wanted.isdisjoint(each) for each in self._bytes()]
        packed = np.packbits(found, bitorder="little").tobytes()
        return packed + bytes(-len(packed) % 4)

    def _all_bytes(self) -> tuple[bytes, ...]:
        return tuple(map(self._tokenizer.token_bytes, range(self._tokenizer.vocab_size)))


def bad_word_tokens(tokenizer: Tokenizer, words: Iterable[str]) -> tuple[tuple[int, ...], ...]:
    """The tokens of each word, at the beginning of a text and after a space.

    vLLM omits the latter unless both have the same number of tokens. Raises RequestError for a word
    without tokens.
    """
    found: dict[tuple[int, ...], None] = {}
    for word in words:
        plain = tuple(tokenizer.encode(word.lstrip(), parse_special=True))
        if not plain:
            raise RequestError(f'field "bad_words" has the word "{word}", which has no tokens')
        found[plain] = None
        found[tuple(tokenizer.encode(" " + word.lstrip(), parse_special=True))] = None
    return tuple(found)
