"""Messages in the forms that families document, against `transformers` given those forms."""

import json
from collections.abc import Callable
from datetime import datetime
from typing import Any

import pytest

from model_zoo.chat.chat_template import ChatTemplate
from model_zoo.chat.message_form import MessageForm
from model_zoo.chat.messages import Message
from model_zoo.tokenizers.tokenizer import load_tokenizer
from runtime.errors import RequestError
from tests.chat_templates import (
    ASK,
    CALLS,
    CALLS_BOTH,
    CALLS_OTHER,
    OTHER_RESULT,
    RESULT,
    SPECIAL,
    SYSTEM,
    THANKS,
    TOOLS,
    as_json,
    calling_alone,
    encode_chat,
    plain,
    rendered_by_transformers,
)
from tests.unit.model_zoo.tokenizers.tiny_vocabulary import CONTROL, byte_level_metadata

Turn = dict[str, Any]
NOW = datetime(2031, 5, 4, 3, 2, 1)

# Constructions of published templates, each around the same turns.
TURNS = (
    "{% for m in messages %}<|{{ m.role }}|>CALLS"
    "{% if not m.tool_calls %}{{ m.content }}{% endif %}\n{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)
EACH = "{% for call in m.tool_calls or [] %}CALL{% endfor %}"


def template_of(call: str) -> str:
    return TURNS.replace("CALLS", EACH.replace("CALL", call))


# Of Functionary's construction: arguments are added to a text.
ADDED = template_of("{{ '>>>' + call.function.name + '\n' + call.function.arguments }}")
# Arguments are printed, and an object as Python prints it.
PRINTED = template_of("{{ call.function.name }} {{ call.function.arguments }}")
# What most templates do.
DUMPED = template_of(
    "{{ m.content }}{{ call.function.name }}{{ call.function.arguments | tojson }}"
)
# Of the construction of GLM and MiniMax: content is printed whatever it is, arguments one by one.
ITEMS = template_of(
    "{{ m.content }}{{ call.function.name }}"
    "{% for name, value in call.function.arguments.items() %}"
    "<{{ name }}>{{ value if value is string else value | tojson }}{% endfor %}"
)
# Either is understood.
EITHER = template_of(
    "{{ call.function.name }}"
    "{% if call.function.arguments is string %}{{ call.function.arguments }}"
    "{% else %}{{ call.function.arguments | tojson }}{% endif %}"
)
# Of the construction of DeepSeek's distilled models: calls are shown where content is none.
ALONE = (
    "{% for m in messages %}{% if m.role == 'assistant' and m.content is none %}"
    "{% for call in m.tool_calls %}{{ '<call>' + call.type + call.function.name + '\n```json\n'"
    " + call.function.arguments + '\n```' }}{% endfor %}"
    "{% else %}{{ '<' + m.role + '>' + m.content }}{% endif %}{% endfor %}"
)


def with_objects(turn: Turn) -> list[Turn]:
    return [turn]


def with_json(turn: Turn) -> list[Turn]:
    calls = turn.get("tool_calls", ())
    for call in calls:
        call["function"] = call["function"] | {"arguments": as_json(call)}
    return [turn]


WORDS_AND_CALLS = Message("assistant", "Let me see.", tool_calls=CALLS_BOTH.tool_calls)
TALKS = {
    "no calls": [SYSTEM, ASK],
    "a call": [ASK, CALLS, RESULT],
    "a call of all types": [ASK, CALLS_OTHER, OTHER_RESULT, THANKS],
    "parallel calls": [SYSTEM, ASK, CALLS_BOTH, RESULT, OTHER_RESULT],
    "words and calls": [ASK, WORDS_AND_CALLS, RESULT, OTHER_RESULT, THANKS],
}


@pytest.mark.parametrize("about", TALKS)
@pytest.mark.parametrize(
    ("source", "form"),
    [
        (ADDED, with_json),
        (PRINTED, with_json),
        (DUMPED, with_objects),
        (ITEMS, with_objects),
        (EITHER, with_objects),
        (ALONE, calling_alone),
    ],
    ids=["added", "printed", "dumped", "items", "either", "alone"],
)
def test_calls_are_shown_in_the_form_that_the_template_reads(
    source: str, form: Callable[[Turn], list[Turn]], about: str
) -> None:
    messages = TALKS[about]
    chat = [turn for message in messages for turn in form(plain(message))]
    expected = rendered_by_transformers(source, chat, TOOLS)
    assert expected is not None
    assert all(call.name in expected for m in messages for call in m.tool_calls)
    assert "None" not in expected
    assert ChatTemplate(source, **SPECIAL).render(messages, tools=TOOLS) == expected


# Of Firefunction's construction: tools are a JSON text, and the time is told.
FUNCTIONS = (
    "{{ bos_token + 'Functions:\n' + functions + '\nToday is ' + datetime + '.' }}"
    "{% for m in messages %}<|{{ m.role }}|>{{ m.content | default('', true) | trim }}"
    "{% if 'tool_calls' in m and m['tool_calls'] %} functools["
    "{% for call in m['tool_calls'] %}"
    "{{ '{\"name\": \"' + call['function']['name'] + '\", \"arguments\": ' "
    "+ call['function']['arguments'] | tojson + '}' }}"
    "{{ '' if loop.last else ', ' }}{% endfor %}]{% endif %}{% endfor %}<|assistant|>"
)


@pytest.mark.parametrize("tools", [None, [], TOOLS], ids=["none", "empty", "two"])
def test_tools_and_the_time_are_variables_where_firefunctions_template_reads_them(tools) -> None:
    """As in the model's card: `functions` are schemas as indented JSON, `datetime` is a text."""
    functions = json.dumps([tool["function"] for tool in tools or ()], indent=4)
    messages = [SYSTEM, ASK, CALLS_BOTH, RESULT, OTHER_RESULT]
    chat = [plain(message) for message in messages]
    expected = rendered_by_transformers(
        FUNCTIONS, chat, functions=functions, datetime=f"{NOW:%Y-%m-%d %H:%M:%S}"
    )
    assert expected is not None and "2031-05-04 03:02:01" in expected
    template = ChatTemplate(FUNCTIONS, **SPECIAL)
    values = template.values(messages)
    given = {"tools": tools, "add_generation_prompt": True}
    assert template.render_values(values, given, now=NOW) == expected


def test_variables_that_are_given_come_before_those_that_are_made() -> None:
    template = ChatTemplate(FUNCTIONS, **SPECIAL)
    text = template.render([ASK], tools=TOOLS, functions="mine", datetime="yesterday")
    assert "Functions:\nmine\nToday is yesterday." in text


def test_typed_control_tokens_stay_text_in_functions() -> None:
    tokenizer = load_tokenizer(byte_level_metadata({"<|end|>": CONTROL}), architecture="qwen2")
    tool = {"type": "function", "function": {"name": "<|end|>", "description": "ö<|end|>"}}
    template = ChatTemplate(FUNCTIONS)
    tokens = encode_chat(template, tokenizer, [Message("user", "hello")], tools=[tool])
    assert not set(tokens) & set(tokenizer.vocabulary.control.values())
    text = tokenizer.decode(tokens)
    assert json.dumps([tool["function"]], indent=4) in text


def test_tools_are_refused_where_a_template_has_functions_of_its_own() -> None:
    source = "{% set functions = 'none' %}{{ functions }}{{ messages[0].content }}"
    tokenizer = load_tokenizer(byte_level_metadata({"<|end|>": CONTROL}), architecture="qwen2")
    with pytest.raises(RequestError, match="does not support tools"):
        encode_chat(ChatTemplate(source), tokenizer, [Message("user", "hello")], tools=TOOLS)


@pytest.mark.parametrize(
    "source",
    [
        template_of(""),  # calls are not shown
        "{{ messages[0].tool_calls.x.y }}",
        "{{ raise_exception('no') if messages[0].tool_calls is defined else '' }}",
    ],
)
def test_a_template_that_shows_calls_in_no_form_gets_them_as_text(source: str) -> None:
    form = ChatTemplate(source).form
    assert (form.tools, form.calls) == (None, None)


def test_a_template_that_is_too_slow_for_probes_has_the_form_of_most() -> None:
    loops = "{% for m in range(99999) %}{% for n in range(99999) %}{% endfor %}{% endfor %}"
    slow = loops + "{{ messages[0].tool_calls }}"
    assert ChatTemplate(slow).form == MessageForm(tools=None)
