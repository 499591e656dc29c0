"""A pretend grammar: which of three classes a token may be of depends on all tokens before it."""

from collections.abc import Sequence
from dataclasses import dataclass

CLASSES = 3  # token t is of class t % CLASSES


@dataclass(frozen=True, slots=True)
class PretendGrammar:
    """`first`: the class of the first token of an answer."""

    first: int

    def matcher(self) -> "PretendMatcher":
        return PretendMatcher(self.first)


class PretendMatcher:
    """`allowed_class`: that of the next token."""

    free = 0

    def __init__(self, first: int) -> None:
        self.allowed_class = first

    def accept(self, token: int) -> None:
        assert token % CLASSES == self.allowed_class, "the token does not follow the grammar"
        self.allowed_class = class_after(self.allowed_class, token)

    def acceptable(self, tokens: Sequence[int]) -> int:
        after = self.allowed_class
        for count, token in enumerate(tokens):
            if token % CLASSES != after:
                return count
            after = class_after(after, token)
        return len(tokens)

    def allowed(self, mask: memoryview) -> None:
        raise AssertionError("a pretend device reads `allowed_class`")

    def look_ahead(self, tokens: Sequence[int], masks: Sequence[memoryview]) -> None:
        raise AssertionError("a pretend device reads `allowed_class`")


def class_after(before: int, token: int) -> int:
    """The class of the token after `token`, which was to be of the class `before`."""
    return (before + token // CLASSES) % CLASSES
