"""Breaking texts inside strings with a character that is found nowhere else."""

import re
from collections.abc import Iterator, Mapping
from functools import lru_cache
from typing import Any

from model_zoo.tokenizers.specials import any_of
from runtime.errors import RequestError

# Noncharacters: no text means anything by them, and no template looks for them.
_SENTINELS = tuple(map(chr, [*range(0xFDD0, 0xFDF0), *(0xFFFE + (n << 16) for n in range(17))]))


def unused_sentinel(value: Any) -> str:
    """A noncharacter that stands in no string within `value`."""
    used: set[str] = set()
    for text in _strings(value):
        used.update(text)
    for sentinel in _SENTINELS:
        if sentinel not in used:
            return sentinel
    raise RequestError("The conversation contains every Unicode noncharacter; remove one of them.")


def break_texts(value: Any, texts: tuple[str, ...], sentinel: str) -> Any:
    """`value` with the sentinel behind the first character of each of `texts` in its strings.

    Lower and upper case count as equal, since a template may change one to the other.
    """
    return _broken(value, _pattern_of(texts), sentinel) if texts else value


def _broken(value: Any, pattern: re.Pattern[str], sentinel: str) -> Any:
    if isinstance(value, str):
        while pattern.search(value):  # breaking one may leave another that overlaps it
            value = pattern.sub(lambda match: match[0][0] + sentinel + match[0][1:], value)
        return value
    if isinstance(value, Mapping):
        return {
            _broken(key, pattern, sentinel): _broken(item, pattern, sentinel)
            for key, item in value.items()
        }
    if isinstance(value, list | tuple):
        return [_broken(item, pattern, sentinel) for item in value]
    return value


@lru_cache(maxsize=64)
def _pattern_of(texts: tuple[str, ...]) -> re.Pattern[str]:
    # SentencePiece writes a space in a token as U+2581: either may be typed.
    either = any_of(text.replace(" ", "\u2581") for text in texts).replace("\u2581", "[ \u2581]")
    return re.compile(either, re.DOTALL | re.IGNORECASE)


def _strings(value: Any) -> Iterator[str]:
    if isinstance(value, str):
        yield value
    elif isinstance(value, Mapping):
        for key, item in value.items():
            yield from _strings(key)
            yield from _strings(item)
    elif isinstance(value, list | tuple):
        for item in value:
            yield from _strings(item)
