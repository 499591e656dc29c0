"""Breaks given texts within strings by inserting an otherwise unused character."""

import json
import re
from collections.abc import Collection, Iterator, Mapping
from functools import lru_cache
from typing import Any

from model_zoo.tokenizers.specials import any_of
from runtime.errors import RequestError

MAX_DEPTH = 64
# Unicode noncharacters, which texts and templates do not use.
_SENTINELS = tuple(map(chr, [*range(0xFDD0, 0xFDF0), *(0xFFFE + (n << 16) for n in range(17))]))


def unused_sentinel(value: Any) -> str:
    """A noncharacter that occurs in no string within `value`, not even JSON-escaped.

    RequestError if there is none, or if values are nested deeper than `MAX_DEPTH`.
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
                f"The conversation's values are nested more than {MAX_DEPTH} levels deep."
            )
        pairs = value.items() if isinstance(value, Mapping) else ()
        for item in (part for pair in pairs for part in pair) if pairs else value:
            yield from _strings(item, depth + 1)


class ControlTokenGuard:
    """Inserts a sentinel into strings, so that a template cannot produce any of `texts` from them.

    Whole occurrences are broken after their first character. Templates also concatenate strings
    with each other and with their own text, and remove parts; so the sentinel is also inserted
    where the end of a string is the beginning of one of `texts` or its beginning the end of one,
    and into strings that are the middle of one. `kept`: texts that are not broken at their ends;
    `words`: strings that do not count as middles. Case is ignored, because a template may change
    it. RequestError if searching for `texts` would take too long.
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
        """`value` with the sentinel inserted in all strings within it, keys included."""
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
        while self._whole.search(text):  # occurrences may overlap
            text = self._whole.sub(lambda match: match[0][0] + sentinel + match[0][1:], text)
        return self._ends.sub(lambda match: self._broken_end(match[0], sentinel), text)

    def _is_middle(self, text: str) -> bool:
        """Whether the template's own text around it could complete one of the texts."""
        short = 0 < len(text) < self._longest and text not in self._words
        return short and text.lower() in self._middles

    def _broken_end(self, found: str, sentinel: str) -> str:
        if len(found) > 1:
            return found
        before = sentinel if found in self._last else ""
        return before + found + (sentinel if found in self._first else "")


@lru_cache(maxsize=64)
def control_token_guard(
    texts: tuple[str, ...], kept: frozenset[str], words: frozenset[str]
) -> ControlTokenGuard | None:
    return ControlTokenGuard(texts, kept=kept, words=words) if texts else None


def _either_space(texts: tuple[str, ...]) -> str:
    # SentencePiece writes a space in a token as U+2581; users may type either.
    marked = [text.replace(" ", "\u2581") for text in texts]
    return _expression(marked).replace("\u2581", "[ \u2581]")


def _expression(texts: Collection[str]) -> str:
    expression = any_of(texts)
    if expression is None:
        raise RequestError(
            f"The model's {len(texts):,} control tokens are too long, or too different, to be kept "
            "out of messages; it can only continue a raw prompt."
        )
    return expression


def _both_cases(characters: Iterator[str]) -> frozenset[str]:
    cases = {case for c in characters for case in (c, c.lower(), c.upper())}
    return frozenset(cases | {" ", "\u2581"} if cases & {" ", "\u2581"} else cases)
