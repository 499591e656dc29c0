"""Tokens of thinking in replies of several formats, in deltas of any size."""

import pytest

from model_zoo.chat.formats.reply_format import format_of
from serve_app.messages.tasks import ReplyOpening
from serve_app.replica.reply_thinking import ThinkingCounter

TAGS = format_of("<think> </think>")
HARMONY = format_of("<|channel|> <|message|>")
REPLIES = {
    "none": (TAGS, False, ["Hi", " there"], 0),
    "tags": (TAGS, False, ["<think>", "\n", "I ", "see", "</think>", "\n\n", "Hi"], 2),
    "opened by the prompt": (TAGS, True, ["I ", "see", "</think>", "Hi", "!"], 3),
    "only thinking": (TAGS, True, ["I ", "see", " it"], 3),
    "held back": (TAGS, True, ["I", "", "<", "3", "</", "think>", "Hi"], 6),
    "channels": (
        HARMONY,
        False,
        ["<|channel|>", "analysis", "<|message|>", "I ", "see", "<|end|>", "<|start|>",
         "assistant", "<|channel|>", "final", "<|message|>", "Hi"],
        2,
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", REPLIES)
def test_each_token_is_thinking_or_not(name):
    """The tokens of tags may count on either side."""
    format, thinks, pieces, least = REPLIES[name]
    counter = ThinkingCounter(ReplyOpening(format, thinks))
    counted = [counter.count(piece, 1) for piece in pieces]
    assert all(count in (0, 1) for count in counted)
    tags = sum(piece.strip() in ("", "<think>", "</think>") or "<|" in piece for piece in pieces)
    assert least <= sum(counted) <= least + tags + (format is HARMONY) * 3
    assert not counted[-1] or name == "only thinking"


def test_tokens_of_one_delta_are_divided_by_characters():
    counter = ThinkingCounter(ReplyOpening(TAGS, True))
    assert counter.count("123456</think>Hello!", 10) == 5
    assert counter.count(" Bye", 3) == 0


def test_text_after_a_call_that_ends_the_thinking_is_none():
    tools = [{"type": "function", "function": {"name": "f", "parameters": {}}}]
    opening = ReplyOpening(format_of("tools <tool_call> <think> </think>"), True)
    counter = ThinkingCounter(opening, tools)
    counter.count('I see<tool_call>{"name": "f"}', 9)
    assert counter.count("</tool_call>Hi", 4) == 0
