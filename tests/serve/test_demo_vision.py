"""The demo model on pictures and questions that are not in its training data."""

import base64
import re
from random import Random

import numpy as np
import ollama
import openai
import pytest
from PIL import Image

from tests.checkout import ROOT
from tools.demo_picture_dialogues import (
    Message,
    as_requests,
    held_out,
    is_right,
    with_text_first,
)
from tools.demo_pictures import draw, invent

SIDE = 192
LEAST_RIGHT = 0.85  # of few questions; the report of `make train-demo` asks hundreds
QUESTIONS = held_out(seed=7, per_skill=2)
README_PICTURE = invent(Random("README 7"), held=True, shapes=3, number=True)


def of_openai(messages: list[Message]) -> list[dict]:
    """The same turns with each image as a data URI."""
    spoken = []
    for message in as_requests(messages, size=SIDE):
        shown = [
            f"data:image/png;base64,{base64.b64encode(image).decode()}"
            for image in message.get("images", ())
        ]
        images = [{"type": "image_url", "image_url": {"url": uri}} for uri in shown]
        text = {"type": "text", "text": message["content"].replace("[img]", "")}
        parts = [text, *images] if "[img]" in message["content"] else [*images, text]
        spoken.append({"role": message["role"], "content": parts})
    return spoken


def answer_of_ollama(native: ollama.Client, messages: list[Message]) -> str:
    options = {"temperature": 0, "num_predict": 80}
    asked = as_requests(messages, size=SIDE)
    return native.chat(model="demo", messages=asked, options=options).message.content or ""


def answer_of_openai(oai: openai.OpenAI, messages: list[Message]) -> str:
    reply = oai.chat.completions.create(
        model="demo",
        messages=of_openai(messages),  # type: ignore[arg-type]
        temperature=0,
        max_tokens=80,
    )
    return reply.choices[0].message.content or ""


@pytest.mark.parametrize("order", [list, with_text_first], ids=["image-first", "text-first"])
def test_most_answers_are_right(native: ollama.Client, order):
    right = [is_right(q.answer, answer_of_ollama(native, order(q.messages))) for q in QUESTIONS]
    assert sum(right) >= LEAST_RIGHT * len(QUESTIONS), [
        question.skill for question, fits in zip(QUESTIONS, right, strict=True) if not fits
    ]


@pytest.mark.parametrize("order", [list, with_text_first], ids=["image-first", "text-first"])
def test_both_protocols_give_the_same_answers(native: ollama.Client, oai: openai.OpenAI, order):
    for question in QUESTIONS[::4]:
        messages = order(question.messages)
        assert answer_of_openai(oai, messages) == answer_of_ollama(native, messages)


def test_the_picture_of_the_readme_is_not_in_the_training_data():
    with Image.open(ROOT / "models" / "demo.png") as shown:
        assert np.array_equal(np.asarray(shown), np.asarray(draw(README_PICTURE, SIDE)))


def test_the_readme_shows_the_models_answers(native: ollama.Client):
    told = re.findall(r"^> \*\*(.+)\*\* (.+)$", (ROOT / "README.md").read_text(), re.MULTILINE)
    assert len(told) >= 3
    for question, answer in told:
        asked = [Message(role="user", content=question, pictures=[README_PICTURE])]
        assert answer_of_ollama(native, asked) == answer
