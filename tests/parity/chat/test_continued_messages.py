"""Prompts that end within the last message, against `transformers`, and their replies."""

from dataclasses import replace

import pytest

from model_zoo.chat.chat_template import ChatTemplate
from model_zoo.chat.control_token_guard import without_sentinel
from model_zoo.chat.formats.reply_format import format_of
from model_zoo.chat.go_templates.converter import jinja_source
from model_zoo.chat.messages import Message, ReplyStart
from model_zoo.chat.unforged import render_unforged
from model_zoo.tokenizers.tokenizer import load_tokenizer
from runtime.errors import RequestError
from tests.chat_templates import (
    SPECIAL,
    TEMPLATES,
    plain,
    rendered_by_transformers,
    template_source,
)
from tests.reply_parsing import Parsed, parsed, replied
from tests.unit.model_zoo.chat.test_reply_formats import (
    COMMAND_A,
    DEEPSEEK,
    GEMMA4,
    GLM4,
    HARMONY,
    HERMES,
    LLAMA,
    MISTRAL,
    QWEN3,
)
from tests.unit.model_zoo.test_chat_model import model_with, prompt_of
from tests.unit.model_zoo.tokenizers.tiny_vocabulary import byte_level_metadata

USER = Message("user", "What is the opposite of hot?")
BEGUN = "The opposite of hot"
ENDS = {
    "words": Message("assistant", BEGUN),
    "a space": Message("assistant", f"{BEGUN} "),
    "JSON": Message("assistant", '{"answer": "'),
    "thinking": Message("assistant", BEGUN, thinking="Cold."),
    "said twice": Message("assistant", USER.text),
}


def rendered(template: ChatTemplate, *messages: Message) -> str:
    tokenizer = load_tokenizer(byte_level_metadata({}), architecture="qwen2")
    variables = {"add_generation_prompt": False}
    found = render_unforged(template, tokenizer, messages, variables, continued=True)
    return without_sentinel(found.text, found.sentinel) if found.sentinel else found.text


@pytest.mark.parametrize("end", ENDS)
@pytest.mark.parametrize("name", TEMPLATES)
def test_prompts_that_continue_a_message_are_those_of_transformers(name: str, end: str) -> None:
    source, talk = template_source(name), [USER, ENDS[end]]
    expected = rendered_by_transformers(
        source,
        [plain(message) for message in talk],
        continue_final_message=True,
        add_generation_prompt=False,
    )
    if expected is None:  # the template needs tools
        with pytest.raises(RequestError):
            rendered(ChatTemplate(source, **SPECIAL), *talk)
    else:
        assert expected.rstrip().endswith(ENDS[end].text.strip())
        assert rendered(ChatTemplate(source, **SPECIAL), *talk) == expected


OLLAMA = """{{- range $i, $_ := .Messages }}
{{- $last := eq (len (slice $.Messages $i)) 1 }}<|{{ .Role }}|>{{ .Content }}
{{- if not (and (eq .Role "assistant") $last) }}<|end|>{{ end }}
{{- if and (ne .Role "assistant") $last }}<|assistant|>{{ end }}{{- end }}"""


def test_templates_of_ollama_leave_the_message_open_themselves() -> None:
    template = ChatTemplate(jinja_source(OLLAMA))
    talk = [USER, Message("assistant", f"{BEGUN} ")]
    assert (
        rendered(template, *talk)
        == template.render(talk)
        == (f"<|user|>{USER.text}<|end|><|assistant|>{BEGUN} ")
    )


TURNS = (
    "{% for m in messages %}<{{ m.role }}>{{ m.content }}</>{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)
CONTINUED = {"reply": ReplyStart.CONTINUED}


def test_the_prompt_ends_within_the_last_message() -> None:
    model = model_with(TURNS)
    talk = [USER, Message("assistant", f"{BEGUN} ")]
    asked = f"<user>{USER.text}</><assistant>"
    assert prompt_of(model, talk, **CONTINUED) == f"{asked}{BEGUN} "
    assert model.prepare(talk, **CONTINUED).continues
    assert prompt_of(model, talk) == f"{asked}{BEGUN} </><assistant>"
    parts = [replace(USER, content=(USER.text,)), Message("assistant", (BEGUN, " is"))]
    listed = TURNS.replace("m.content", "m.content | map(attribute='text') | join")
    assert prompt_of(model_with(listed), parts, **CONTINUED) == f"{asked}{BEGUN} is"


def test_an_empty_last_message_is_a_new_turn() -> None:
    model = model_with(TURNS)
    talk = [USER, Message("assistant", "")]
    assert prompt_of(model, talk, **CONTINUED) == prompt_of(model, [USER])
    assert not model.prepare(talk, **CONTINUED).continues


@pytest.mark.parametrize(
    ("source", "last", "message"),
    [
        (TURNS, USER, "Only a message of the assistant"),
        ("{{ messages[0].content }}", Message("assistant", "x"), "does not show the end"),
    ],
)
def test_what_cannot_be_continued_is_refused(source: str, last: Message, message: str) -> None:
    with pytest.raises(RequestError, match=message):
        model_with(source).prepare([USER, last], **CONTINUED)


@pytest.mark.parametrize(
    ("begun", "thinks"),
    [("x", False), ("<think>", True), ("<think>\nHm", True), ("<think>Hm</think>x", False)],
)
def test_a_reply_may_continue_thinking(begun: str, thinks: bool) -> None:
    model = model_with(TURNS + "{# <think> </think> #}")
    prompt = model.prepare([USER, Message("assistant", begun)], **CONTINUED)
    assert (prompt.thinks, prompt.continues) == (thinks, not thinks)


TAGGED = [HERMES, QWEN3, MISTRAL, LLAMA, GEMMA4, DEEPSEEK, COMMAND_A, GLM4]
FUNCTIONARY = ">>>all >>>${recipient}"
MESSAGES = [HARMONY, FUNCTIONARY]
CALLED = '<tool_call>{"name": "get_time", "arguments": {}}</tool_call>'


@pytest.mark.parametrize("template", [*TAGGED, *MESSAGES])
@pytest.mark.parametrize("text", [" is cold.\n", '{"name": "get_time"}', "all\nget_time\n{}"])
def test_a_reply_that_continues_a_message_begins_with_text(template: str, text: str) -> None:
    events = replied(format_of(template), list(text), continues=True)
    assert parsed(events) == Parsed(text)


def test_calls_may_follow_the_text() -> None:
    get_time = (("get_time", {}, None),)
    for template, rest in (
        (HERMES, CALLED),
        (HARMONY, "<|end|><|start|>assistant<|channel|>commentary to=functions.get_time"
                  "<|message|>{}"),
        (FUNCTIONARY, ">>>get_time\n{}"),
    ):  # fmt: skip
        found = parsed(replied(format_of(template), list(f" is{rest}"), continues=True))
        assert found == Parsed(" is", calls=get_time), template
