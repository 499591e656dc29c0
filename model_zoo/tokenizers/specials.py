"""Cutting text at the special tokens written in it."""

import re
from collections.abc import Iterable, Mapping
from functools import cached_property

# As many nested groups as the regular expression compiler takes with ease.
_MAX_DEPTH = 40


class SpecialTexts:
    """Finds special tokens in text: leftmost first, and of those at one place the longest."""

    def __init__(self, *, control: Mapping[str, int], user_defined: Mapping[str, int]) -> None:
        self.control = control
        self.user_defined = user_defined
        self._ids = {**user_defined, **control}

    def cut(self, text: str, *, parse_special: bool) -> list[str | int]:
        """Ordinary text and token ids in turn; control tokens count only with `parse_special`."""
        pattern = self._every if parse_special else self._ordinary
        if pattern is None:
            return [text] if text else []
        parts: list[str | int] = []
        end = 0
        for match in pattern.finditer(text):
            if match.start() > end:
                parts.append(text[end : match.start()])
            parts.append(self._ids[match[0]])
            end = match.end()
        if end < len(text):
            parts.append(text[end:])
        return parts

    @cached_property
    def _every(self) -> re.Pattern[str] | None:
        return re.compile(any_of(self._ids), re.DOTALL) if self._ids else None

    @cached_property
    def _ordinary(self) -> re.Pattern[str] | None:
        return re.compile(any_of(self.user_defined), re.DOTALL) if self.user_defined else None


def any_of(texts: Iterable[str], *, depth: int = 0) -> str:
    """A regular expression that matches the longest of `texts`, as a prefix tree.

    A flat alternation of a few thousand texts is tried one by one at every `<`. Texts that go on
    one from the other deeper than `_MAX_DEPTH` are tried one by one all the same.
    """
    if depth > _MAX_DEPTH:
        return f"(?:{'|'.join(map(re.escape, sorted(set(texts), key=len, reverse=True)))})"
    by_first: dict[str, list[str]] = {}
    for text in sorted(set(texts)):
        by_first.setdefault(text[:1], []).append(text)
    optional = by_first.pop("", None) is not None
    branches = []
    for group in by_first.values():
        shared = _shared_prefix(group[0], group[-1])  # of the whole group: it is sorted
        ends = (text[len(shared) :] for text in group)
        rest = any_of(ends, depth=depth + 1) if len(group) > 1 else ""
        branches.append(re.escape(shared) + rest)
    if not branches:
        return ""
    joined = branches[0] if len(branches) == 1 and not optional else f"(?:{'|'.join(branches)})"
    return f"{joined}?" if optional else joined


def _shared_prefix(left: str, right: str) -> str:
    length = 0
    while left[: length + 1] == right[: length + 1] and length < min(len(left), len(right)):
        length += 1
    return left[:length]
