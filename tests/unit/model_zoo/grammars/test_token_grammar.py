"""Masks over the tokens of a vocabulary, and what costs too much."""

import itertools
import json
import re

import pytest

from model_zoo.grammars import token_grammar
from model_zoo.grammars.token_grammar import GrammarError, TokenGrammars, TokenMatcher
from model_zoo.tokenizers.tokenizer import load_tokenizer
from model_zoo.tokenizers.world import escaped
from runtime.errors import GenerationFailedError
from tests.byte_tokenizer import END, ByteTokenizer
from tests.unit.model_zoo.tokenizers.tiny_vocabulary import CONTROL, NORMAL, byte_level_metadata
from tests.world_vocabulary import PIECES

TOKENIZER = ByteTokenizer("<tool>", "<other>")
GRAMMARS = TokenGrammars(TOKENIZER)  # type: ignore[arg-type]
TOOL = TOKENIZER.vocabulary.control["<tool>"]
# The first character after it takes most of a second.
SLOW = "x{1000}{1000}{1000}"


def matcher_of(lark: str) -> TokenMatcher:
    return GRAMMARS.compile(lark).matcher()


def allowed(matcher: TokenMatcher, words: int = 9) -> set[str]:
    """The texts of the tokens that may follow; "" for the end token."""
    mask = bytearray(4 * words)
    matcher.allowed(memoryview(mask))
    found = {token for token in range(32 * words) if mask[token // 8] >> token % 8 & 1}
    return {"" if token in TOKENIZER.end_tokens else TOKENIZER.text([token]) for token in found}


def accept(matcher: TokenMatcher, text: str) -> None:
    for token in TOKENIZER.encode(text, parse_special=True):
        matcher.accept(token)


def test_control_tokens_match_their_ids_only() -> None:
    matcher = matcher_of(f'start: TEXT <[{TOOL}]> "x"\nTEXT: /[a<]*/')
    assert allowed(matcher) == {"a", "<", "<tool>"}
    accept(matcher, "a<")
    assert allowed(matcher) == {"a", "<", "<tool>"}
    accept(matcher, "<tool>")
    assert allowed(matcher) == {"x"}
    accept(matcher, "x")
    assert allowed(matcher) == {""}


def test_decomposed_text_of_a_grammar_is_demanded_as_it_is() -> None:
    metadata = byte_level_metadata({END: CONTROL}, pre="qwen2")
    tokenizer = load_tokenizer(metadata, architecture="qwen2")
    text = "cafe\u0301"
    assert tokenizer.decode(tokenizer.encode(text)) != text
    grammar = TokenGrammars(tokenizer).compile(f'start: "{text}"')
    matcher = grammar.matcher()
    for token in [*tokenizer.encode(text, exact=True), *tokenizer.end_tokens]:
        mask = bytearray(4 * grammar.words)
        matcher.allowed(memoryview(mask))
        assert mask[token // 8] >> token % 8 & 1, tokenizer.token_text(token)
        matcher.accept(token)


def test_an_end_token_with_text_ends_an_answer_only_where_the_grammar_does() -> None:
    """The end of RWKV's answers is a paragraph break, which forms may contain as white space."""
    pieces = [escaped(piece) for piece in PIECES]
    end = 1 + PIECES.index(b"\n\n")
    keys = {"model": "rwkv", "tokens": ["<s>", *pieces], "eos_token_id": 0, "eot_token_id": end}
    keys["token_type"] = [CONTROL, *len(pieces) * [NORMAL]]
    metadata = {f"tokenizer.ggml.{key}": value for key, value in keys.items()}
    tokenizer = load_tokenizer(metadata, architecture="rwkv7")
    grammar = TokenGrammars(tokenizer).compile(r"start: /a\s*b/")
    matcher, mask = grammar.matcher(), bytearray(4 * grammar.words)
    ends = []
    for text in ("a", "\n", "\n", "b"):
        matcher.accept(tokenizer.encode(text)[0])
        matcher.allowed(memoryview(mask))
        ends.append(mask[end // 8] >> end % 8 & 1)
    assert tokenizer.end_tokens == {0, end} and ends == [0, 0, 0, 1]


def test_rows_of_a_model_that_no_token_has_are_never_allowed() -> None:
    assert "a" in allowed(matcher_of("start: /(?s:.*)/"), words=20)


def test_tokens_that_do_not_follow_the_grammar_fail() -> None:
    matcher = matcher_of('start: "ab"')
    accept(matcher, "ac")
    with pytest.raises(GenerationFailedError, match="cannot be enforced"):
        allowed(matcher)


def test_the_end_is_allowed_where_the_grammar_may_end() -> None:
    matcher = matcher_of('start: "a" "b"?')
    assert allowed(matcher) == {"a"}
    accept(matcher, "a")
    assert allowed(matcher) == {"b", ""}
    matcher.accept(TOKENIZER.vocabulary.control[END])
    assert allowed(matcher)


def test_matchers_of_one_grammar_are_independent() -> None:
    grammar = GRAMMARS.compile('start: "ab"')
    first, second = grammar.matcher(), grammar.matcher()
    accept(first, "a")
    assert (allowed(first), allowed(second)) == ({"b"}, {"a"})


@pytest.mark.parametrize(
    ("texts", "count"), [("bcc", 3), ("bxc", 1), ("x", 0), ("bc!" + END, 4), ("bc!ab", 3)]
)
def test_masks_ahead_are_those_of_the_tokens_and_change_nothing(texts: str, count: int) -> None:
    grammar = GRAMMARS.compile('start: "a" "b" "c"* "!"')
    matcher, tokens = grammar.matcher(), TOKENIZER.encode(texts, parse_special=True)
    accept(matcher, "a")
    assert matcher.acceptable(tokens) == count
    before = allowed(matcher)
    masks = [memoryview(bytearray(4 * 9)) for _ in tokens]
    matcher.look_ahead(tokens, masks)
    assert allowed(matcher) == before == {"b"}
    follower = grammar.matcher()
    accept(follower, "a")
    allowed(follower)
    for token, mask in zip(tokens[:count], masks, strict=False):
        if token in TOKENIZER.end_tokens:
            break
        follower.accept(token)
        expected = memoryview(bytearray(4 * 9))
        follower.allowed(expected)
        assert mask == expected
    assert not any(any(mask) for mask in masks[count:])


def test_an_answer_does_not_pay_for_masks_ahead() -> None:
    matcher, tokens = matcher_of("start: /[a-z]{50}/"), TOKENIZER.encode("abc")
    allowed(matcher)
    saved_s = matcher._budget_s
    matcher.look_ahead(tokens, [memoryview(bytearray(36)) for _ in tokens])
    assert matcher._budget_s == saved_s


@pytest.mark.parametrize(
    ("grammar", "meaning"),
    [
        ("start: start", "no token continues it"),
        (
            json.dumps({"grammars": [{"json_schema": {"not": {"pattern": "a"}}}]}),
            '"not" cannot be enforced here',
        ),
    ],
)
def test_errors_name_nothing_of_the_librarys_own(grammar, meaning) -> None:
    with pytest.raises(GrammarError, match=re.escape(meaning) + "$"):
        GRAMMARS.compile(grammar)


def test_a_grammar_whose_first_mask_costs_too_much_is_refused(monkeypatch) -> None:
    monkeypatch.setattr(token_grammar, "BURST_S", 0.02)
    with pytest.raises(GrammarError, match="costs too much"):
        matcher_of(f"start: /{SLOW}/")


def test_an_answer_whose_masks_cost_too_much_fails(monkeypatch) -> None:
    grammar = GRAMMARS.compile("start: /[a-z]*/")
    monkeypatch.setattr(token_grammar, "BURST_S", 2.5)
    seconds = itertools.count(step=2)
    monkeypatch.setattr(token_grammar.time, "thread_time", lambda: next(seconds) / 2)
    matcher = grammar.matcher()
    for _ in range(2):  # a second each
        allowed(matcher)
    with pytest.raises(GenerationFailedError, match="costs too much"):
        allowed(matcher)
    monkeypatch.setattr(token_grammar, "TOKEN_S", 1.0)
    matcher = grammar.matcher()
    for _ in range(6):
        accept(matcher, "a")
        allowed(matcher)
    monkeypatch.setattr(token_grammar, "TOKEN_S", 0.0)
    allowed(matcher)
    with pytest.raises(GenerationFailedError, match="costs too much"):
        allowed(matcher)
