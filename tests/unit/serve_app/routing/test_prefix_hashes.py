"""Prefix hashes of tasks: which prompts share prefixes, and how far."""

from dataclasses import replace

import pytest

from model_zoo.chat.messages import ImagePart, Message, ToolCall
from runtime.engine.request import ResumeState, SamplingParams
from serve_app.messages.tasks import (
    ChatTask,
    Conversation,
    EmbeddingTask,
    Infill,
    PromptTask,
    RawText,
    TokenIds,
)
from serve_app.routing.prefix_hashes import IMAGE_TOKENS, WHOLE_BYTES, prefix_hashes_of

SYSTEM = Message("system", "You know the desert and all who cross it. " * 20)
QUESTION = Message("user", "How far does a camel walk in a day without water? " * 10)
ANSWER = Message("assistant", "That depends on the load. " * 10)
MORE = Message("user", "And with water?")


def chat(prompt, **facts) -> ChatTask:
    return ChatTask("t", "demo", prompt, SamplingParams(), **facts)


def talk(*messages: Message, **facts) -> ChatTask:
    return chat(Conversation(messages, **facts))


def shared_tokens(one: ChatTask, other: ChatTask) -> int:
    first, second = prefix_hashes_of(one), prefix_hashes_of(other)
    same = sum(a == b for a, b in zip(first.keys, second.keys, strict=False))
    return first.ends[same - 1] if same else 0


def test_the_next_turn_shares_the_whole_previous_prompt():
    first, second = talk(SYSTEM, QUESTION), talk(SYSTEM, QUESTION, ANSWER, MORE)
    keys = prefix_hashes_of(first).keys
    assert len(keys) > 8
    assert prefix_hashes_of(second).keys[: len(keys)] == keys


def test_different_conversations_share_their_system_message_only():
    other = Message("user", "Who sells salt here? " * 10)
    shared = shared_tokens(talk(SYSTEM, QUESTION), talk(SYSTEM, other))
    assert 0.8 * len(SYSTEM.text) / 4 < shared <= len(SYSTEM.text) / 4 + 10


@pytest.mark.parametrize(
    "other",
    [
        replace(talk(SYSTEM, QUESTION), model="other"),
        replace(talk(SYSTEM, QUESTION), cache_salt="another tenant"),
        talk(SYSTEM, QUESTION, thinking=False),
        talk(SYSTEM, QUESTION, variables={"enable_thinking": False}),
        talk(SYSTEM, QUESTION, tools=({"function": {"name": "f"}},)),
        talk(SYSTEM, QUESTION, after=(1, 2, 3)),
        talk(Message("assistant", SYSTEM.text), QUESTION),
        talk(QUESTION, SYSTEM),
        chat(RawText(SYSTEM.text + QUESTION.text)),
        chat(Infill(SYSTEM.text, QUESTION.text)),
        chat(Conversation((SYSTEM, QUESTION), template="{{ .Prompt }}")),
    ],
)
def test_prompts_that_differ_at_their_start_share_nothing(other):
    assert shared_tokens(talk(SYSTEM, QUESTION), other) == 0


def test_the_order_of_template_variables_does_not_matter():
    one, other = {"a": 1, "b": [True, None]}, {"b": [True, None], "a": 1}
    first, second = talk(QUESTION, variables=one), talk(QUESTION, variables=other)
    assert prefix_hashes_of(first) == prefix_hashes_of(second)


@pytest.mark.parametrize(
    "change",
    [
        {"thinking": "Camels, then."},
        {"name": "Ann"},
        {"tool_calls": (ToolCall("weather", {"place": "Timbuktu"}),)},
        {"content": ANSWER.text[:-2] + "!"},
        {"role": "tool"},
    ],
)
def test_the_shared_prefix_ends_at_a_changed_message(change):
    one = talk(SYSTEM, ANSWER, QUESTION)
    other = talk(SYSTEM, replace(ANSWER, **change), QUESTION)
    assert 0 < shared_tokens(one, other) < (len(SYSTEM.text) + len(ANSWER.text)) / 4 + 10


@pytest.mark.parametrize("size", [100, WHOLE_BYTES + 1, 3_000_000])
def test_images_are_distinguished_by_their_bytes_and_count_as_tokens(size):
    data = bytes(range(256)) * (size // 256 + 1)
    same, end = ImagePart(data[:size]), ImagePart(data[: size - 1] + b"!")
    longer = ImagePart(data[: size + 1])
    ask = "What does this picture show? "

    def about(image: ImagePart) -> ChatTask:
        return talk(Message("user", (image, ask)))

    assert shared_tokens(about(same), talk(Message("user", (same, "And here?")))) > IMAGE_TOKENS / 2
    assert shared_tokens(about(same), about(end)) == shared_tokens(about(same), about(longer)) == 0
    assert IMAGE_TOKENS < prefix_hashes_of(about(same)).tokens < IMAGE_TOKENS + 30


def test_token_ids_are_counted_exactly():
    hashes = prefix_hashes_of(chat(TokenIds(tuple(range(1000)))))
    assert 1000 <= hashes.tokens < 1010


def test_a_resumed_task_has_the_same_prefix_and_more_tokens():
    task = talk(SYSTEM, QUESTION)
    begun = replace(task, resume=ResumeState(tuple(range(50)), 120))
    whole, rest = prefix_hashes_of(task), prefix_hashes_of(begun)
    assert rest.keys == whole.keys
    assert rest.tokens == whole.tokens + 50


def test_texts_to_embed_share_nothing_but_count_as_tokens():
    task = EmbeddingTask("t", "demo", (RawText("salt " * 100), TokenIds((1, 2, 3))))
    hashes = prefix_hashes_of(task)
    assert hashes.keys == ()
    assert hashes.tokens == (500 + 12 + 3) // 4


def test_a_lone_surrogate_is_accepted():
    assert prefix_hashes_of(chat(RawText("\ud800 " * 100))).tokens > 100


def test_a_prompt_that_is_only_tokenized_costs_and_caches_nothing():
    hashes = prefix_hashes_of(PromptTask("t", "demo", RawText("salt " * 5000)))
    assert (hashes.keys, hashes.tokens) == ((), 0)
