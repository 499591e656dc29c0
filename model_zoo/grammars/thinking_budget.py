"""Ends the thinking of an answer after a number of tokens."""

import codecs
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from model_zoo.chat.formats.reply_parser import ReplyParser
from runtime.engine.request import Grammar, Matcher

# Tokens of thinking that begins again after the budget is used up, which neither templates nor
# models intend. Because it is not ended at once, the tokens of an answer need no masks and can be
# proposed.
AGAIN = 16
# Maximum bytes of a UTF-8 character after its first one. Characters are not cut off.
_REST_OF_CHARACTER = 3
_ALL = np.uint32(2**32 - 1)


@dataclass(frozen=True, slots=True)
class ThinkingBudget:
    """`grammar` (None: any tokens), with at most `budget` tokens of thinking. Then the tokens
    `ending` are forced, and the token after them is not `again`, unless that is None. The grammar
    takes precedence over the budget.

    `parser`: makes a parser of the answer's text. `token_bytes`: the text of a token in the answer.
    """

    grammar: Grammar | None
    budget: int
    ending: tuple[int, ...]
    again: int | None
    parser: Callable[[], ReplyParser]
    token_bytes: Callable[[int], bytes]

    def matcher(self) -> "ThinkingBudgetMatcher":
        return ThinkingBudgetMatcher(self)


class ThinkingBudgetMatcher:
    """The state of a `ThinkingBudget`; see `runtime.engine.request.Matcher`. Every token after the
    start of thinking counts, up to the one that completes its end."""

    def __init__(self, rule: ThinkingBudget) -> None:
        self._rule = rule
        self._inner: Matcher | None = None if rule.grammar is None else rule.grammar.matcher()
        self._parser = rule.parser()
        self._decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")
        self._budget = rule.budget  # tokens of thinking that are left in the answer
        self._here = rule.budget  # the same for the current stretch of thinking
        self._late = 0  # tokens beyond it, which complete a character
        self._begun = False  # whether the answer has thinking or text
        # For each of the next tokens: the only one allowed (True), or one that is not (False).
        self._forced: deque[tuple[int, bool]] = deque()
        if self._parser.thinking:
            self._begin()

    @property
    def free(self) -> int:
        return 0 if self._inner is not None else self._free

    def accept(self, token: int) -> None:
        if self._inner is not None:
            self._inner.accept(token)
        if self._forced:
            wanted, only = self._forced.popleft()
            if only and token != wanted:  # the grammar takes precedence
                self._forced.clear()
        thinking = self._parser.thinking
        text = self._decoder.decode(self._rule.token_bytes(token))
        self._begun |= bool(self._parser.feed(text))
        if not thinking:
            if self._parser.thinking:
                self._begin()
            return
        self._late += self._here <= 0
        self._budget, self._here = max(0, self._budget - 1), self._here - 1
        self._end_if_due()

    def allowed(self, mask: memoryview) -> None:
        words = np.frombuffer(mask, np.uint32)
        if self._inner is None:
            words[:] = _ALL
        else:
            self._inner.allowed(mask)
        if self._forced:
            _restrict(words, *self._forced[0])

    def acceptable(self, tokens: Sequence[int]) -> int:
        """As many as the grammar accepts, but so few that the budget leaves the next token free."""
        count = len(tokens) if self._inner is None else self._inner.acceptable(tokens)
        return min(count, max(0, self._free - 1))

    def look_ahead(self, tokens: Sequence[int], masks: Sequence[memoryview]) -> None:
        assert len(tokens) < self._free
        if self._inner is not None:
            self._inner.look_ahead(tokens, masks)
            return
        for mask in masks:
            np.frombuffer(mask, np.uint32)[:] = _ALL

    @property
    def _free(self) -> int:
        """How many of the next tokens the budget leaves free, whatever they are."""
        if self._forced:
            return 0
        if self._parser.thinking:
            return max(1, self._here)
        return 1 + max(self._budget, AGAIN if self._begun else 0)

    def _begin(self) -> None:
        self._here, self._late = max(self._budget, AGAIN if self._begun else 0), 0
        self._begun = True
        self._end_if_due()

    def _end_if_due(self) -> None:
        whole = not self._decoder.getstate()[0] or self._late >= _REST_OF_CHARACTER
        if self._parser.thinking and self._here <= 0 and whole and not self._forced:
            again = self._rule.again
            self._forced.extend((token, True) for token in self._rule.ending)
            self._forced.extend([] if again is None else [(again, False)])


def _restrict(words: NDArray[np.uint32], token: int, only: bool) -> None:
    """Allows only `token` in the words of a mask, or only the others, unless none would be left."""
    bit = np.zeros_like(words)
    bit[token // 32] = 1 << token % 32
    kept = words & (bit if only else ~bit)
    if kept.any():
        words[:] = kept
