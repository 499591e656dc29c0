"""Breaking texts inside strings with a character that is found nowhere else."""

import json
import re
from collections.abc import Collection, Iterator, Mapping
from functools import lru_cache
from typing import Any

from model_zoo.tokenizers.specials import any_of
from runtime.errors import RequestError

MAX_DEPTH = 64
# Noncharacters: no text means anything by them, and no template looks for them.
_SENTINELS = tuple(map(chr, [*range(0xFDD0, 0xFDF0), *(0xFFFE + (n << 16) for n in range(17))]))


def unused_sentinel(value: Any) -> str:
    """A noncharacter that stands in no string within `value`, not even as JSON may write it.

    RequestError where there is none, or where values lie deeper in each other than `MAX_DEPTH`.
    """
    texts = list(_strings(value))
    used: set[str] = set()
    used.update(*texts)
    for sentinel in _SENTINELS:
        escaped = _escaped(sentinel)
        if sentinel not in used and not any(escaped in text for text in texts):
            return sentinel
    raise RequestError("The conversation contains every Unicode noncharacter; remove one of them.")


def without_sentinel(text: str, sentinel: str) -> str:
    return text.replace(sentinel, "").replace(_escaped(sentinel), "")


def _escaped(sentinel: str) -> str:
    return json.dumps(sentinel)[1:-1]


def _strings(value: Any, depth: int = 0) -> Iterator[str]:
    if isinstance(value, str):
        yield value
    elif isinstance(value, Mapping | list | tuple):
        if depth > MAX_DEPTH:
            raise RequestError(
                f"The conversation's values lie more than {MAX_DEPTH} deep within each other."
            )
        pairs = value.items() if isinstance(value, Mapping) else ()
        for item in (part for pair in pairs for part in pair) if pairs else value:
            yield from _strings(item, depth + 1)


class Breaker:
    """Puts a sentinel into strings, so that no text of `texts` can come of them.

    Whole ones are broken behind their first character. A template also puts strings next to each
    other and to its own text, and cuts pieces out: a text of which either end stands in a string
    is broken there, and one whose middle is a whole string is broken in it. `kept` are texts that
    are not broken at their ends, `words` strings that are not taken for the middle of a text.
    Lower and upper case count as equal, since a template may change one to the other. RequestError
    where looking for `texts` would take too long.
    """

    def __init__(
        self, texts: tuple[str, ...], *, kept: frozenset[str], words: frozenset[str]
    ) -> None:
        self._whole = re.compile(_either_space(texts), re.DOTALL | re.IGNORECASE)
        self._first, self._last = (
            _both_cases(t[0] for t in texts),
            _both_cases(t[-1] for t in texts),
        )
        ends = self._first | self._last
        long = [text for text in kept if len(text) > 1 and not ends.isdisjoint(text)]
        self._ends = re.compile(_expression([*long, *ends]), re.DOTALL)
        self._middles = "\0".join(text[1:-1].lower() for text in texts)
        self._longest = max(map(len, texts))
        self._words = words

    def broken(self, value: Any, sentinel: str) -> Any:
        """`value` with all strings within it broken, keys included."""
        if isinstance(value, str):
            return self._broken_text(value, sentinel)
        if isinstance(value, Mapping):
            return {
                self.broken(key, sentinel): self.broken(item, sentinel)
                for key, item in value.items()
            }
        if isinstance(value, list | tuple):
            return [self.broken(item, sentinel) for item in value]
        return value

    def _broken_text(self, text: str, sentinel: str) -> str:
        if self._is_middle(text.strip()):
            begin = len(text) - len(text.lstrip())
            text = text[: begin + 1] + sentinel + text[begin + 1 :]
        while self._whole.search(text):  # breaking one may leave another that overlaps it
            text = self._whole.sub(lambda match: match[0][0] + sentinel + match[0][1:], text)
        return self._ends.sub(lambda match: self._broken_end(match[0], sentinel), text)

    def _is_middle(self, text: str) -> bool:
        """Whether it could become one of the texts between two pieces of a template's own text."""
        short = 0 < len(text) < self._longest and text not in self._words
        return short and text.lower() in self._middles

    def _broken_end(self, found: str, sentinel: str) -> str:
        if len(found) > 1:
            return found
        before = sentinel if found in self._last else ""
        return before + found + (sentinel if found in self._first else "")


@lru_cache(maxsize=64)
def breaker(texts: tuple[str, ...], kept: frozenset[str], words: frozenset[str]) -> Breaker | None:
    return Breaker(texts, kept=kept, words=words) if texts else None


def _either_space(texts: tuple[str, ...]) -> str:
    # SentencePiece writes a space in a token as U+2581: either may be typed.
    marked = [text.replace(" ", "\u2581") for text in texts]
    return _expression(marked).replace("\u2581", "[ \u2581]")


def _expression(texts: Collection[str]) -> str:
    expression = any_of(texts)
    if expression is None:
        raise RequestError(
            f"The model's {len(texts):,} control tokens are too long, or too different, to be kept "
            "out of what people write; it can only continue a raw prompt."
        )
    return expression


def _both_cases(characters: Iterator[str]) -> frozenset[str]:
    cases = {case for c in characters for case in (c, c.lower(), c.upper())}
    return frozenset(cases | {" ", "\u2581"} if cases & {" ", "\u2581"} else cases)
