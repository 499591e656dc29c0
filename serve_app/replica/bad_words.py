"""Converts bad words to the sequences of tokens that an answer must not complete."""

from collections.abc import Iterable

from model_zoo.tokenizers.tokenizer import Tokenizer
from runtime.errors import RequestError


def bad_word_tokens(tokenizer: Tokenizer, words: Iterable[str]) -> tuple[tuple[int, ...], ...]:
    """The tokens of each word at the beginning of a text and after a space.

    vLLM omits the latter unless both have the same number of tokens. Raises RequestError.
    """
    found: dict[tuple[int, ...], None] = {}
    for word in words:
        plain = tuple(tokenizer.encode(word.lstrip(), parse_special=True))
        if not plain:
            raise RequestError(f'field "bad_words" has the word "{word}", which has no tokens')
        found[plain] = None
        found[tuple(tokenizer.encode(" " + word.lstrip(), parse_special=True))] = None
    return tuple(found)
