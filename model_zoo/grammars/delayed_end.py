"""Grammars of answers with a least length."""

from collections.abc import Iterable, Sequence

import numpy as np

from runtime.engine.request import Grammar, Matcher


class DelayedEnd:
    """`grammar` without `end_tokens` among the first `min_tokens` tokens, except where it allows no
    other token: the form of an answer takes precedence over its length."""

    def __init__(self, grammar: Grammar, end_tokens: Iterable[int], min_tokens: int) -> None:
        self._grammar = grammar
        self._end_tokens = tuple(end_tokens)
        self._min_tokens = min_tokens

    def matcher(self) -> "DelayedEndMatcher":
        return DelayedEndMatcher(self._grammar.matcher(), self._end_tokens, self._min_tokens)


class DelayedEndMatcher:
    """The state of a `DelayedEnd`; see `runtime.engine.request.Matcher`."""

    free = 0

    def __init__(self, matcher: Matcher, end_tokens: tuple[int, ...], min_tokens: int) -> None:
        tokens = np.array(end_tokens, np.int64)
        self._matcher = matcher
        self._words = tokens // 32
        self._others = ~(np.uint32(1) << (tokens % 32).astype(np.uint32))
        self._left = min_tokens  # how many more tokens the answer must have

    def accept(self, token: int) -> None:
        self._matcher.accept(token)
        self._left -= 1

    def allowed(self, mask: memoryview) -> None:
        self._matcher.allowed(mask)
        self._delay(mask, ahead=0)

    def acceptable(self, tokens: Sequence[int]) -> int:
        return self._matcher.acceptable(tokens)

    def look_ahead(self, tokens: Sequence[int], masks: Sequence[memoryview]) -> None:
        self._matcher.look_ahead(tokens, masks)
        for ahead, mask in enumerate(masks, start=1):
            self._delay(mask, ahead)

    def _delay(self, mask: memoryview, ahead: int) -> None:
        """Excludes the end tokens from the mask after `ahead` more tokens."""
        if self._left <= ahead:
            return
        words = np.frombuffer(mask, np.uint32)
        kept = words.copy()
        np.bitwise_and.at(kept, self._words, self._others)
        if kept.any():
            words[:] = kept
