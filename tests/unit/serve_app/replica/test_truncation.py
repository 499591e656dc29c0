"""Prompts that exceed the context: whole turns are left out of chats, tokens of other texts."""

import random
from math import log2

import pytest

from model_zoo.chat.messages import Message
from model_zoo.chat_model import Prompt
from runtime.engine.request import SamplingParams
from runtime.errors import PromptTooLongError, RequestError, TooManyImagesError
from serve_app.messages.tasks import ChatTask, RawText, Truncation
from serve_app.replica.truncation import (
    cut_text,
    shortened_tokens,
    with_recent_turns,
    with_tokens_cut,
)

TASK = ChatTask("t", "demo", RawText(""), SamplingParams())


class Model:
    """One token per character; remembers what it has prepared."""

    def __init__(self) -> None:
        self.prepared: list[list[Message]] = []

    def prepare(self, messages: list[Message]) -> Prompt:
        self.prepared.append(messages)
        return Prompt(tuple(map(ord, "".join(message.text for message in messages))))

    def least(self, messages: list[Message]) -> int:
        return sum(len(message.text) for message in messages) // 2


def conversation(spelled: str) -> list[Message]:
    """Turns such as "s3 u2 a4": the role's initial and the number of characters."""
    roles = {"s": "system", "u": "user", "a": "assistant", "t": "tool"}
    return [Message(roles[word[0]], word[0] * int(word[1:])) for word in spelled.split()]


def kept(spelled: str, limit: int, shortened: int) -> str:
    prompt = with_recent_turns(
        conversation(spelled),
        (model := Model()).prepare,
        limit=limit,
        shortened=shortened,
        least=model.least,
        model="demo",
        setting="num_ctx",
    )
    return "".join(map(chr, prompt.tokens))


@pytest.mark.parametrize(
    ("spelled", "limit", "shortened", "text"),
    [
        ("s1 u1 a1 u1", 4, 2, "suau"),  # it fits
        ("s1 u1 a1 u1", 3, 3, "su"),
        ("s1 u1 a1 u1 a1 u1", 5, 4, "suau"),
        ("u1 a1 u1 a1 u1", 4, 4, "uau"),
        ("u1 a1 u1 a1 u1", 4, 2, "u"),
        ("u9 a1 u4", 4, 1, "uuuu"),  # the last turn may take the room of the answer
        ("a1 u1 a1 u1", 3, 3, "u"),  # a greeting belongs to the first turn
        ("u1 a1 t1 t1 a1 u1", 5, 5, "u"),  # calls and their results leave together
        ("u1 a1 u1 a1 t1 a1", 5, 5, "uata"),
        ("u1 u1 a1 u1", 3, 3, "u"),  # two messages of a user are one turn
        ("u1 a1 u1 s1 u1", 4, 4, "usu"),  # a system message does not divide a turn
        ("s1 u1 s1 a1 u1", 4, 4, "ssu"),  # all system messages stay
    ],
)
def test_the_oldest_turns_are_left_out(spelled: str, limit: int, shortened: int, text: str) -> None:
    assert kept(spelled, limit, shortened) == text


@pytest.mark.parametrize("spelled", ["u5", "u1 a1 u5", "s4 u1 a1 u1", "s5", "u1 a1 u1 a4"])
def test_the_system_prompt_and_the_last_turn_are_never_left_out(spelled: str) -> None:
    with pytest.raises(PromptTooLongError, match=r"exceeds the context length.*last turn.*'demo'"):
        kept(spelled, 4, 4)


def test_the_limit_can_be_parsed() -> None:
    with pytest.raises(PromptTooLongError, match="maximum context length is 4001 tokens"):
        kept(" ".join(["u9"] * 500), 4000, 4000)


def test_as_many_turns_stay_as_fit_and_few_are_rendered() -> None:
    chance = random.Random(7)
    for _ in range(300):
        sizes = [chance.randint(1, 9) for _ in range(chance.randint(1, 60))]
        messages = [Message("user" if at % 2 == 0 else "assistant", "x" * n)
                    for at, n in enumerate([*sizes, *sizes[: 1 - len(sizes) % 2]])]  # fmt: skip
        limit = chance.randint(20, 200)
        shortened = chance.randint(19, limit)
        fitting = [at for at in range(0, len(messages), 2)
                   if sum(len(m.text) for m in messages[at:]) <= shortened]  # fmt: skip
        whole = sum(len(m.text) for m in messages) <= limit
        expected = messages if whole else messages[fitting[0] :] if fitting else messages[-2:]
        model = Model()
        prompt = with_recent_turns(
            messages,
            model.prepare,
            limit=limit,
            shortened=shortened,
            least=lambda _: 0,
            model="demo",
            setting="num_ctx",
        )
        assert len(prompt.tokens) == sum(len(m.text) for m in expected)
        assert len(model.prepared) <= 3 + 2 * log2(len(messages))


def test_what_cannot_fit_is_not_rendered() -> None:
    model = Model()
    messages = conversation("u9999 a1 u1")
    with_recent_turns(
        messages,
        model.prepare,
        limit=9,
        shortened=9,
        least=model.least,
        model="demo",
        setting="num_ctx",
    )
    assert model.prepared == [messages[2:]]


@pytest.mark.parametrize("error", [PromptTooLongError, TooManyImagesError])
def test_turns_with_too_many_images_are_left_out(error: type[RequestError]) -> None:
    def prepare(messages) -> Prompt:
        if len(messages) > 1:
            raise error("images")
        return Prompt((1,))

    messages = conversation("u1 a1 u1")
    prompt = with_recent_turns(
        messages, prepare, limit=9, shortened=9, least=lambda _: 0, model="demo", setting="num_ctx"
    )
    assert prompt.tokens == (1,)


@pytest.mark.parametrize("spelled", ["u1", "u1 a1 u1"])
def test_a_last_turn_with_too_many_images_is_refused_for_these(spelled: str) -> None:
    def prepare(messages) -> Prompt:
        raise TooManyImagesError(f"{len(messages)} images")

    with pytest.raises(TooManyImagesError, match="1 images"):
        with_recent_turns(
            conversation(spelled),
            prepare,
            limit=9,
            shortened=9,
            least=lambda _: 0,
            model="demo",
            setting="num_ctx",
        )


@pytest.mark.parametrize(
    ("max_tokens", "context", "most"),
    [(None, 100, 75), (10, 100, 90), (90, 100, 75), (None, 2, 1), (1, 100, 99)],
)
def test_a_shortened_prompt_leaves_room_for_an_answer(max_tokens, context, most) -> None:
    task = ChatTask("t", "demo", RawText(""), SamplingParams(), max_tokens=max_tokens)
    assert shortened_tokens(task, context) == most


@pytest.mark.parametrize(
    ("keep", "tokens"),
    [
        (0, (4, 5, 6, 7, 8, 9)),
        (2, (0, 1, 6, 7, 8, 9)),
        (5, (0, 1, 2, 3, 4, 9)),
        (99, (0, 1, 2, 3, 4, 9)),
        (-1, (0, 1, 2, 3, 4, 9)),
    ],
)
def test_the_first_and_the_last_tokens_stay(keep: int, tokens: tuple[int, ...]) -> None:
    prompt = Prompt(tuple(range(10)))
    cut = with_tokens_cut(prompt, limit=9, shortened=6, keep=keep)
    assert cut.tokens == tokens
    assert with_tokens_cut(prompt, limit=10, shortened=6, keep=keep) == prompt


@pytest.mark.parametrize("longest", [1, 3])
@pytest.mark.parametrize("keep", [-1, 0, 3, 100])
@pytest.mark.parametrize("length", [5, 39, 40, 1000])
def test_only_characters_that_would_not_stay_are_removed(length, keep, longest) -> None:
    """With one token per character."""

    def cut(text: str) -> str:
        whole = Prompt(tuple(map(ord, text)))
        tokens = with_tokens_cut(whole, limit=6, shortened=5, keep=keep).tokens
        return "".join(map(chr, tokens))

    text = "".join(chr(0x4E00 + at) for at in range(length))
    shorter = cut_text(text, Truncation(keep=keep), most_tokens=6, longest_token=longest)
    assert len(shorter) <= longest * 14
    assert cut(shorter) == cut(text)
