"""Replies of every format, parsed whole and cut anywhere, against the messages that they
express."""

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from model_zoo.chat.formats.events import CallArguments, CallBegin, CallEnd, Text
from model_zoo.chat.formats.reply_format import format_of
from tests import malformed_replies, reply_transcripts
from tests.reply_parsing import PARIS, TOOLS, Parsed, parsed, replied


def call(name: str = "get_weather", identity: str | None = None, **arguments: Any):
    return name, arguments or PARIS, identity


JSON = json.dumps(PARIS, ensure_ascii=False)
HERMES = "tools <tool_call>"
QWEN3 = "tools <tool_call> <think> </think>"
MISTRAL = "tools [TOOL_CALLS]"
MAGISTRAL = "tools [TOOL_CALLS] [THINK] [/THINK]"
LLAMA = "tools <|python_tag|>"
HARMONY = "<|channel|> <|message|>"
GEMMA4 = "tools <|tool_call> <|channel>thought <channel|>"
DEEPSEEK = "tools <｜tool▁calls▁begin｜> <think> </think>"
COMMAND_A = "tools <|START_ACTION|> <|START_THINKING|> <|END_THINKING|>"
COMMAND_R = "tools Action: ```json"
PHI4 = "tools <|tool_call|>"
GLM4 = "tools [gMASK] <|observation|>"
GENERIC = "no template with functions"

CASES: list[tuple[str, str, Parsed]] = [
    (HERMES, "Hello.", Parsed("Hello.")),
    (HERMES, "\n Hello. \n", Parsed("\n Hello. \n")),
    (HERMES, "a < b <tool", Parsed("a < b <tool")),
    (
        HERMES,
        f'I look.\n<tool_call>\n{{"name": "get_weather", "arguments": {JSON}}}\n</tool_call>',
        Parsed("I look.", calls=(call(),)),
    ),
    (
        HERMES,
        f'<tool_call>{{"arguments": {JSON}, "name": "get_weather"}}</tool_call>\n'
        '<tool_call>{"name": "get_time", "arguments": {}}</tool_call>',
        Parsed(calls=(call(), ("get_time", {}, None))),
    ),
    (HERMES, '<tool_call>{"name": "get_time"}', Parsed(calls=(("get_time", {}, None),))),
    (
        HERMES,
        f'<tool_call>{{"id": "c1", "type": "function", "function": {{"name": "get_weather", '
        f'"arguments": {JSON}}}}}</tool_call> Done.',
        Parsed("Done.", calls=(call(identity="c1"),)),
    ),
    (
        HERMES,
        '<tool_call>{"name": "get_weather", "arguments": "{\\"days\\": 1}"}</tool_call>',
        Parsed(calls=(call(days=1),)),
    ),
    (
        HERMES,
        "<tool_call>\n<function=get_weather>\n<parameter=city>\nParis\n</parameter>\n"
        "<parameter=days>\n3\n</parameter>\n</function>\n</tool_call>",
        Parsed(calls=(call(city="Paris", days=3),)),
    ),
    (
        HERMES,
        "<tool_call>\n<function=get_time>\n</function>\n</tool_call>",
        Parsed(calls=(("get_time", {}, None),)),
    ),
    (QWEN3, "<think>\nWell.\n</think>\n\nHello.", Parsed("Hello.", "Well.")),
    (QWEN3, "<think>\n\n</think>\n\nHello.", Parsed("Hello.")),
    (QWEN3, "<think>\nCut <of", Parsed("", "Cut <of")),
    (
        QWEN3,
        f'<think>I call.</think><tool_call>{{"name": "get_weather", "arguments": {JSON}}}'
        "</tool_call>",
        Parsed("", "I call.", (call(),)),
    ),
    (
        MISTRAL,
        f'[TOOL_CALLS] [{{"name": "get_weather", "arguments": {JSON}}}, '
        '{"name": "get_time", "arguments": {}}]',
        Parsed(calls=(call(), ("get_time", {}, None))),
    ),
    (MISTRAL, f"[TOOL_CALLS]get_weather[ARGS]{JSON}", Parsed(calls=(call(),))),
    (
        MISTRAL,
        f"So.[TOOL_CALLS]get_weather[CALL_ID]abcdef123[ARGS]{JSON}[TOOL_CALLS]get_time{{}}",
        Parsed("So.", calls=(call(identity="abcdef123"), ("get_time", {}, None))),
    ),
    (MAGISTRAL, "[THINK]Well.[/THINK]Hello.", Parsed("Hello.", "Well.")),
    (LLAMA, f'{{"name": "get_weather", "parameters": {JSON}}}', Parsed(calls=(call(),))),
    (
        LLAMA,
        f'<|python_tag|>{{"name": "get_weather", "parameters": {JSON}}}',
        Parsed(calls=(call(),)),
    ),
    (
        LLAMA,
        '{"name": "get_time", "parameters": {}}; {"name": "get_time", "parameters": {}}\n',
        Parsed(calls=(("get_time", {}, None),) * 2),
    ),
    (LLAMA, '{"name": "Ann", "parameters": {}}', Parsed('{"name": "Ann", "parameters": {}}')),
    (LLAMA, '{"colour": "red"} is JSON.', Parsed('{"colour": "red"} is JSON.')),
    (LLAMA, "[1, 2] is a list", Parsed("[1, 2] is a list")),
    (
        HARMONY,
        "<|channel|>analysis<|message|>Well.<|end|><|start|>assistant<|channel|>final<|message|>"
        "Hello.",
        Parsed("Hello.", "Well."),
    ),
    (
        HARMONY,
        "<|channel|>analysis<|message|>I call.<|end|><|start|>assistant<|channel|>commentary "
        f"to=functions.get_weather <|constrain|>json<|message|>{JSON}",
        Parsed("", "I call.", (call(),)),
    ),
    (
        HARMONY,
        f" to=functions.get_weather<|channel|>commentary json<|message|>{JSON}<|call|>",
        Parsed(calls=(call(),)),
    ),
    (HARMONY, "<|channel|>commentary<|message|>First.<|end|>", Parsed("First.")),
    (HARMONY, "No markers.", Parsed("No markers.")),
    (
        GEMMA4,
        '<|tool_call>call:get_weather{city:<|"|>Paris "{}" <é><|"|>,days:3}<tool_call|>',
        Parsed(calls=(call(),)),
    ),
    (
        GEMMA4,
        '<|channel>thought\nWell.\n<channel|>So.<|tool_call>call:get_time{deep:{list:[1,<|"|>a'
        '<|"|>,true],none:{}}}<tool_call|>',
        Parsed("So.", "Well.", (call("get_time", deep={"list": [1, "a", True], "none": {}}),)),
    ),
    (
        DEEPSEEK,
        "<think>\nWell.</think>\n\n<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>"
        f"get_weather\n```json\n{JSON}\n```<｜tool▁call▁end｜>\n<｜tool▁call▁begin｜>function"
        "<｜tool▁sep｜>get_time\n```json\n{}\n```<｜tool▁call▁end｜><｜tool▁calls▁end｜>",
        Parsed("", "Well.", (call(), ("get_time", {}, None))),
    ),
    (
        DEEPSEEK,
        f"<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>get_weather<｜tool▁sep｜>{JSON}<｜tool▁call▁end｜>"
        "<｜tool▁calls▁end｜>",
        Parsed(calls=(call(),)),
    ),
    (
        COMMAND_A,
        "<|START_THINKING|>Well.<|END_THINKING|><|START_ACTION|>[\n    {"
        f'"tool_call_id": "0", "tool_name": "get_weather", "parameters": {JSON}}}\n]'
        "<|END_ACTION|>",
        Parsed("", "Well.", (call(identity="0"),)),
    ),
    (COMMAND_A, "<|START_RESPONSE|>Hello.<|END_RESPONSE|>", Parsed("Hello.")),
    (
        COMMAND_R,
        f'Action: ```json\n[\n    {{\n        "tool_name": "get_weather",\n        "parameters": '
        f"{JSON}\n    }}\n]```",
        Parsed(calls=(call(),)),
    ),
    (
        PHI4,
        f'<|tool_call|>[{{"name": "get_weather", "arguments": {JSON}}}]<|/tool_call|>',
        Parsed(calls=(call(),)),
    ),
    (GLM4, f"get_weather\n{JSON}", Parsed(calls=(call(),))),
    (GLM4, "get_weather is a tool", Parsed("get_weather is a tool")),
    (GENERIC, f'{{"name": "get_weather", "arguments": {JSON}}}', Parsed(calls=(call(),))),
    (
        GENERIC,
        f'Yes: <tool_call>{{"name": "get_weather", "arguments": {JSON}}}</tool_call>',
        Parsed("Yes:", calls=(call(),)),
    ),
]
MALFORMED = [
    (HERMES, '<tool_call>{"name": "get_weather", "arguments": {"city": }}</tool_call> x'),
    (HERMES, '<tool_call>{"name": "get_weather", "arguments": [1]}</tool_call>'),
    (HERMES, '<tool_call>{"name": 3, "arguments": {}}</tool_call>'),
    (HERMES, '<tool_call>{"arguments": {}}</tool_call>'),
    (HERMES, '<tool_call>{"name": "get_weather", "arguments": {"city": "Pa'),
    (HERMES, "I look. \n\n<tool_call>nonsense</tool_call>\n"),
    (HERMES, "<tool_call><function=get_weather><parameter=city>Paris"),
    (HERMES, '<tool_call>{"name": "get_weather", "arguments": {"a": "\n"}}</tool_call>'),
    (HERMES, "<tool_call>" + "[" * 3000),
    (MISTRAL, "[TOOL_CALLS]get_weather[ARGS]nothing"),
    (MISTRAL, "[TOOL_CALLS][ARGS]{}"),
    (GEMMA4, "<|tool_call>call:get_weather{city:Paris}<tool_call|>"),
    (DEEPSEEK, "<｜tool▁calls▁begin｜>none"),
    (PHI4, "<|tool_call|>none"),
    (PHI4, "<|tool_call|>[]"),
    (LLAMA, "[]"),
    (COMMAND_R, "Action: to be taken."),
]
OF_FAMILIES = [
    (reply_transcripts.REPLIES[name][0], text)
    for name, text in malformed_replies.MALFORMED.values()
]
NAMED = [f"{place}-{text[:30]}" for place, (_, text, _) in enumerate(CASES)]


@pytest.mark.parametrize(
    ("template", "text", "expected"),
    [*CASES, *reply_transcripts.REPLIES.values()],
    ids=[*NAMED, *reply_transcripts.REPLIES],
)
def test_a_reply_is_parsed_the_same_however_it_is_cut(template, text, expected):
    form = format_of(template)
    assert parsed(replied(form, [text])) == expected
    assert parsed(replied(form, list(text))) == expected
    for cut in range(1, len(text)):
        assert parsed(replied(form, [text[:cut], text[cut:]])) == expected


@pytest.mark.parametrize(("template", "text"), [*MALFORMED, *OF_FAMILIES])
def test_a_malformed_call_becomes_text(template, text):
    form = format_of(template)
    for pieces in ([text], list(text)):
        assert parsed(replied(form, pieces)) == Parsed(text)


def test_a_malformed_call_in_a_list_leaves_the_calls_before_it():
    text = '[TOOL_CALLS][{"name": "get_time", "arguments": {}}, {"name": 5}]'
    found = parsed(replied(format_of(MISTRAL), list(text)))
    assert found == Parsed(', {"name": 5}]', calls=(("get_time", {}, None),))


@pytest.mark.parametrize(("template", "text", "expected"), CASES, ids=NAMED)
def test_calls_are_text_for_a_request_without_tools(template, text, expected):
    form = format_of(template)
    found = parsed(replied(form, list(text), tools={}))
    assert not found.calls
    assert found.thinking == expected.thinking
    assert expected.text in found.text


def test_text_is_passed_on_at_once_unless_it_may_be_markup():
    parser = format_of(QWEN3).parser(TOOLS)
    assert parser.feed("Hello") == [Text("Hello")]
    assert parser.feed(" world") == [Text(" world")]
    assert parser.feed(" <tool") == []
    assert parser.feed("box>") == [Text(" <toolbox>")]


def test_arguments_are_passed_on_as_they_arrive():
    parser = format_of(HERMES).parser(TOOLS)
    assert parser.feed('<tool_call>{"name": "get_time", "arg') == []
    assert parser.feed('uments": {"city"') == [
        CallBegin(0, "get_time"),
        CallArguments(0, '{"city"'),
    ]
    assert parser.feed(': "Par') == [CallArguments(0, ': "Par')]
    assert parser.feed('is"}}') == [CallArguments(0, 'is"}'), CallEnd(0)]


def test_a_reply_may_begin_within_thinking():
    form = format_of(QWEN3)
    events = replied(form, list("Well.\n</think>\n\nHello."), thinks=True)
    assert parsed(events) == Parsed("Hello.", "Well.")


CALL_OF = f'{{"name": "get_weather", "arguments": {JSON}}}'
CLOSED = [
    (HERMES, f"<tool_call>{CALL_OF}", "</tool_call>"),
    (HERMES, "<tool_call><function=get_weather><parameter=city>Paris</parameter>"
             "<parameter=days>2</parameter></function>", "</tool_call>"),
    (PHI4, f"<|tool_call|>[{CALL_OF}]", "<|/tool_call|>"),
    (COMMAND_A, f"<|START_ACTION|>[{CALL_OF}]", "<|END_ACTION|>"),
    (COMMAND_R, f"Action: ```json\n[{CALL_OF}]\n", "```"),
    ("tools <function=", f"<function=get_weather>{JSON}", "</function>"),
    ("tools <TOOLCALL>", f"<TOOLCALL>[{CALL_OF}]", "</TOOLCALL>"),
    (GEMMA4, '<|tool_call>call:get_weather{city:<|"|>Paris<|"|>,days:2}', "<tool_call|>"),
]  # fmt: skip


@pytest.mark.parametrize(("template", "begin", "closer"), CLOSED)
def test_a_reply_that_ends_within_a_closing_tag_has_no_part_of_it(template, begin, closer):
    whole = parsed(replied(format_of(template), [begin + closer]))
    assert len(whole.calls) == 1 and not whole.text
    for end in range(len(closer)):
        assert parsed(replied(format_of(template), list(begin + closer[:end]))) == whole
    other = parsed(replied(format_of(template), list(f"{begin}{closer[:1]} b")))
    assert other.text.endswith(f"{closer[:1]} b")


@pytest.mark.parametrize(
    "template", [HERMES, QWEN3, MISTRAL, LLAMA, GEMMA4, DEEPSEEK, COMMAND_A, PHI4, GLM4, GENERIC]
)
@given(data=st.data())
def test_no_text_is_lost_or_added(template, data):
    form = format_of(template)
    markup = [*form.markup, '{"name": ', '"get_time"', '"arguments": ', "{}", "[", "]", "}", "\n"]
    pieces = data.draw(st.lists(st.one_of(st.sampled_from(sorted(markup)), st.text(max_size=5))))
    whole = "".join(pieces)
    cut, once = parsed(replied(form, pieces)), parsed(replied(form, [whole]))
    assert cut == once
    if not once.calls and form.thinking is None:
        assert once.text == whole
