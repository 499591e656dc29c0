"""Thinking ends when its budget is used up, and nothing else is restricted."""

import random
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

import pytest

from model_zoo.chat.formats.allowed_calls import AllowedCalls
from model_zoo.chat.formats.call_forms import call_form
from model_zoo.chat.formats.reply_format import ReplyFormat, format_of
from model_zoo.chat.formats.reply_grammar import reply_grammar
from model_zoo.grammars.thinking_budget import AGAIN, ThinkingBudget, ThinkingBudgetMatcher
from model_zoo.grammars.token_grammar import TokenGrammars
from tests.byte_tokenizer import ByteTokenizer

TAGS = "tools <tool_call> <think> </think>"
# Their tags are not single tokens.
WORDS = "Here is my thought process: Here is my response:"
HARMONY = "<|channel|> <|message|>"
MARKERS = ("<think>", "</think>", "<|channel|>", "<|message|>", "<|end|>", "<|start|>")
TOKENIZER = ByteTokenizer(*MARKERS)
WORDS_OF_MASK = -(-TOKENIZER.vocab_size // 32)
TOOLS: Mapping[str, Any] = {"f": {"type": "object"}}


def matcher_of(
    template: str,
    budget: int,
    *,
    thinks: bool = False,
    grammar: Any = None,
    tools: Mapping[str, Any] = TOOLS,
    message: str = "",
) -> ThinkingBudgetMatcher:
    form = format_of(template)
    end = form.thinking_end
    assert end is not None
    again = TOKENIZER.encode(end.again)
    return ThinkingBudget(
        grammar,
        budget,
        (*message.encode(), *TOKENIZER.encode(end.text, parse_special=True)),
        again[0] if again else None,
        partial(form.parser, tools, thinks=thinks, formed=grammar is not None),
        lambda token: TOKENIZER.text([token]).encode() if token > 255 else bytes([token]),
    ).matcher()


def mask_of(matcher: ThinkingBudgetMatcher) -> set[int]:
    mask = bytearray(4 * WORDS_OF_MASK)
    matcher.allowed(memoryview(mask))
    return {t for t in range(TOKENIZER.vocab_size) if mask[t // 8] >> t % 8 & 1}


ALL = set(range(TOKENIZER.vocab_size))


def generated(matcher: ThinkingBudgetMatcher, wanted: str | Sequence[int], most: int = 400) -> str:
    """The answer of a model that continues with `wanted` wherever no token is forced. Checks
    everything that the engine relies on."""
    tokens = TOKENIZER.encode(wanted, parse_special=True) if isinstance(wanted, str) else wanted
    left, said = list(tokens), list[int]()
    while left and len(said) < most:
        free = matcher.free
        assert free >= 0
        assert matcher.acceptable(left) <= max(0, free - 1) or matcher._inner is not None
        allowed = mask_of(matcher)
        assert not free or allowed == ALL
        token = left[0] if left[0] in allowed else min(allowed)
        if token == left[0]:
            left.pop(0)
        said.append(token)
        matcher.accept(token)
        assert matcher.free >= free - 1  # it was promised
    while left == [] and matcher.free == 0 and len(said) < most:
        allowed = mask_of(matcher)
        if len(allowed) > 1 or allowed <= TOKENIZER.end_tokens:
            break
        said.append(min(allowed))
        matcher.accept(said[-1])
    return TOKENIZER.text(said)


CASES = {
    "opened by the prompt": (TAGS, True, 3, "abcdef", "abc</think>def"),
    "opened by the model": (TAGS, False, 3, "<think>abcdef", "<think>abc</think>def"),
    "within the budget": (TAGS, True, 4, "abc</think>def", "abc</think>def"),
    "as long as the budget": (TAGS, True, 3, "abc</think>d", "abc</think>d"),
    "none, opened by the prompt": (TAGS, True, 0, "ab", "</think>ab"),
    "none, opened by the model": (TAGS, False, 0, "\n<think>ab", "\n<think></think>ab"),
    "no thinking": (TAGS, False, 0, "Hi there", "Hi there"),
    "tags of several tokens": (
        WORDS, False, 2, "Here is my thought process:abcd",
        "Here is my thought process:abHere is my response:cd",
    ),
    "characters are whole": (TAGS, True, 2, "aäb", "aä</think>b"),
    "a channel": (
        HARMONY, False, 2, "<|channel|>analysis<|message|>abcd",
        "<|channel|>analysis<|message|>ab<|end|><|start|>assistant<|channel|>cd",
    ),
    "a channel, none": (
        HARMONY, False, 0, "<|channel|>analysis<|message|>cd",
        "<|channel|>analysis<|message|><|end|><|start|>assistant<|channel|>cd",
    ),
    "the answer's channel": (
        HARMONY, False, 0, "<|channel|>final<|message|>abc", "<|channel|>final<|message|>abc",
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", CASES)
def test_thinking_ends_after_its_budget(name: str) -> None:
    template, thinks, budget, wanted, expected = CASES[name]
    assert generated(matcher_of(template, budget, thinks=thinks), wanted) == expected


def test_a_message_precedes_the_end() -> None:
    matcher = matcher_of(TAGS, 2, thinks=True, message=" Enough.")
    assert generated(matcher, "abcd") == "ab Enough.</think>cd"


def test_thinking_that_begins_again_has_what_is_left_or_a_few_tokens() -> None:
    wanted = "ab</think>c<think>" + "d" * 60
    found = generated(matcher_of(TAGS, 40, thinks=True), wanted)
    # The end counts as a token of thinking.
    assert found == "ab</think>c<think>" + "d" * 37 + "</think>" + "d" * 23
    found = generated(matcher_of(TAGS, 1, thinks=True), wanted)
    assert found == f"a</think>b</think>c<think>{'d' * AGAIN}</think>{'d' * (60 - AGAIN)}"


def test_another_channel_follows_thinking_that_is_cut_off() -> None:
    matcher = matcher_of(HARMONY, 1)
    generated(matcher, "<|channel|>analysis<|message|>a")
    assert mask_of(matcher) == ALL - {ord("a")}
    matcher.accept(ord("f"))
    assert mask_of(matcher) == ALL


def test_incomplete_characters_do_not_last_for_ever() -> None:
    found = generated(matcher_of(TAGS, 2, thinks=True), [ord("a")] + [0xC3] * 9)
    assert found.index("</think>") == 2 + 3


CALL = '<tool_call>{"name": "f", "arguments": {"a": "<think>"}}</tool_call>'


def test_a_call_within_thinking_ends_it() -> None:
    wanted = f"ab{CALL}{'c' * 40}"
    assert generated(matcher_of(TAGS, 20, thinks=True), wanted) == wanted
    found = generated(matcher_of(TAGS, 20, thinks=True, tools={}), wanted)
    assert found.startswith(f"{wanted[:20]}</think>")


def test_tags_within_a_call_are_no_thinking() -> None:
    wanted = f"a</think>{CALL}{'c' * 60}"
    assert generated(matcher_of(TAGS, 9, thinks=True), wanted) == wanted


def formed(thinks: bool, *, may_think: bool = True, template: str = TAGS) -> Any:
    form: ReplyFormat = format_of(template)
    grammar = reply_grammar(
        TOKENIZER.vocabulary.control,
        form,
        may_think=may_think,
        thinks=thinks,
        answer={"lark_grammar": 'start: "yes" | "<think>" /[a-z]{40}/'},
        calls=AllowedCalls(TOOLS, required=False, parallel=False) if template == HARMONY else None,
        form=None if form.of_messages else call_form(form.name, template),
    )
    return TokenGrammars(TOKENIZER).compile(grammar)  # type: ignore[arg-type]


@pytest.mark.parametrize("budget", [0, 3])
@pytest.mark.parametrize("thinks", [False, True])
def test_a_form_begins_after_the_budget(budget: int, thinks: bool) -> None:
    matcher = matcher_of(TAGS, budget, thinks=thinks, grammar=formed(thinks))
    opened = "" if thinks else "<think>"
    found = generated(matcher, f"{opened}{'abcde'[:budget]}yes")
    assert found == f"{opened}{'abcde'[:budget]}</think>yes"
    assert matcher.free == 0


def test_a_form_takes_precedence_over_the_budget() -> None:
    """Its text may contain the text of a tag, which does not begin thinking."""
    wanted = TOKENIZER.encode("<think>" + "a" * 40)  # as text
    matcher = matcher_of(TAGS, 0, grammar=formed(thinks=False, may_think=False))
    assert generated(matcher, wanted) == "<think>" + "a" * 40


def test_the_form_of_messages_begins_after_the_budget() -> None:
    matcher = matcher_of(HARMONY, 2, grammar=formed(thinks=False, template=HARMONY))
    thought = generated(matcher, "<|channel|>analysis<|message|>ab")
    assert thought.endswith("ab<|end|><|start|>assistant<|channel|>")
    assert {chr(token) for token in mask_of(matcher)} == {"c", "f"}


def test_masks_ahead_are_those_of_the_form() -> None:
    matcher = matcher_of(TAGS, 9, thinks=True, grammar=formed(thinks=True))
    mask_of(matcher)
    tokens = TOKENIZER.encode("ab</think>y", parse_special=True)
    assert matcher.acceptable(tokens) == len(tokens)
    masks = [memoryview(bytearray(4 * WORDS_OF_MASK)) for _ in tokens]
    matcher.look_ahead(tokens, masks)
    for token, mask in zip(tokens, masks, strict=True):
        matcher.accept(token)
        expected = memoryview(bytearray(4 * WORDS_OF_MASK))
        matcher.allowed(expected)
        assert mask == expected


def test_proposals_end_before_the_budget() -> None:
    matcher = matcher_of(TAGS, 5, thinks=True)
    assert matcher.acceptable([1] * 9) == 4
    masks = [memoryview(bytearray(4 * WORDS_OF_MASK)) for _ in range(4)]
    matcher.look_ahead([1] * 4, masks)
    assert all(mask.tobytes() == b"\xff" * mask.nbytes for mask in masks)
    generated(matcher, "abcde")
    assert matcher.acceptable([1] * 99) == AGAIN


@pytest.mark.parametrize("seed", range(20))
def test_random_answers_have_at_most_their_budget_in_one_piece(seed: int) -> None:
    """For any tokens; thinking is counted by the tags."""
    r = random.Random(seed)
    budget, thinks = r.randrange(12), r.random() < 0.5
    control = TOKENIZER.vocabulary.control
    kinds = [ord("a"), ord("\n"), 0xE2, 0x82, control["<think>"], control["</think>"]]
    wanted = r.choices(kinds, [8, 1, 1, 1, 1, 1], k=80)
    text = generated(matcher_of(TAGS, budget, thinks=thinks, tools={}), wanted)
    before, *pieces = ("<think>" * thinks + text).split("<think>")
    for index, piece in enumerate(pieces):
        thought = piece.partition("</think>")[0]
        most = budget if index == 0 and not before.strip() else max(budget, AGAIN)
        assert len(thought.encode()) <= most * 3 + 3
