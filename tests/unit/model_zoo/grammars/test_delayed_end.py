"""Grammars of answers with a least length."""

from model_zoo.grammars.delayed_end import DelayedEnd
from tests.unit.model_zoo.grammars.test_token_grammar import GRAMMARS, TOKENIZER, accept, allowed


def matcher_of(lark: str, *, min_tokens: int):
    return DelayedEnd(GRAMMARS.compile(lark), TOKENIZER.end_tokens, min_tokens).matcher()


def test_an_answer_does_not_end_early_where_it_can_continue() -> None:
    matcher = matcher_of('start: "a"*', min_tokens=2)
    for expected in ({"a"}, {"a"}, {"a", ""}, {"a", ""}):
        assert allowed(matcher) == expected
        accept(matcher, "a")


def test_an_answer_ends_early_where_it_cannot_continue() -> None:
    matcher = matcher_of('start: "a"', min_tokens=5)
    assert allowed(matcher) == {"a"}
    accept(matcher, "a")
    assert allowed(matcher) == {""}


def test_masks_ahead_are_those_of_the_same_tokens_later() -> None:
    matcher, later = (matcher_of('start: "a"*', min_tokens=3) for _ in range(2))
    allowed(matcher)
    tokens = TOKENIZER.encode("aaaa")
    masks = [memoryview(bytearray(4 * 9)) for _ in tokens]
    matcher.look_ahead(tokens, masks)
    for token, mask in zip(tokens, masks, strict=True):
        later.accept(token)
        expected = memoryview(bytearray(4 * 9))
        later.allowed(expected)
        assert mask == expected
    assert allowed(matcher) == {"a"}
    assert allowed(later) == {"a", ""}
