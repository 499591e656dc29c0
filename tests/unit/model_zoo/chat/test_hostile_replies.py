"""Replies that are hard to separate: markup in values, missing ends, line breaks, sizes."""

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from model_zoo.chat.formats.events import (
    CallAborted,
    CallArguments,
    CallBegin,
    CallEnd,
    Text,
    Thinking,
)
from model_zoo.chat.formats.parameter_calls import MAX_LITERAL
from model_zoo.chat.formats.reply_format import format_of
from tests.reply_parsing import TOOLS, Parsed, parsed, replied
from tests.reply_transcripts import REPLIES

TEMPLATES = {name: template for name, (template, _, _) in REPLIES.items()} | {
    "hermes": "tools <tool_call>",
    "qwen3": "tools <tool_call> <think> </think>",
    "mistral": "tools [TOOL_CALLS]",
    "llama": "tools <|python_tag|>",
    "harmony": "<|channel|> <|message|>",
    "gemma4": "tools <|tool_call>",
    "deepseek": "tools <｜tool▁calls▁begin｜> <think> </think>",
    "granite": "tools <|tool_call|> </think> <response></response>",
    "kimi-k2-thinking": "tools <|tool_calls_section_begin|> <think> </think>",
    "qwen3.5": "tools <tool_call> <function= <think> </think>",
}
MARKS = "</tool_call> <tool_call> ]] }, [TOOL_CALLS] <think> </invoke> <|im_end|>"
KIMI_CALL = "<|tool_call_begin|>functions.get_time:0<|tool_call_argument_begin|>{}<|tool_call_end|>"


def one(city: Any = "x", name: str = "get_time") -> tuple[tuple[str, dict[str, Any], None]]:
    return ((name, {"city": city}, None),)


TWO = (("get_time", {}, None),) * 2
JSON = '{"name": "get_time", "arguments": {}}'
FUNCTION = "<function=get_time>\n<parameter=city>\nx\n</parameter>\n</function>"

HOSTILE: dict[str, tuple[str, str, Parsed]] = {
    # Markup in values.
    "json": (
        "hermes",
        f'<tool_call>{{"name": "get_time", "arguments": {{"city": "{MARKS}"}}}}</tool_call>',
        Parsed(calls=one(MARKS)),
    ),
    "list": (
        "mistral",
        f'[TOOL_CALLS][{{"name": "get_time", "arguments": {{"city": "{MARKS}"}}}}]',
        Parsed(calls=one(MARKS)),
    ),
    "parameters": (
        "qwen3-coder",
        "<tool_call>\n<function=get_time>\n<parameter=city>\n<parameter=x>{MARKS}</function>\n"
        "</parameter>\n</function>\n</tool_call>",
        Parsed(calls=one("<parameter=x>{MARKS}</function>")),
    ),
    "pairs": (
        "glm-4.6",
        f"<tool_call>get_time\n<arg_key>city</arg_key>\n<arg_value>{MARKS}</arg_value>\n</tool_call>",
        Parsed(calls=one(MARKS)),
    ),
    "gemma": (
        "gemma4",
        f'<|tool_call>call:get_time{{city:<|"|>}}<tool_call|>{MARKS}<|"|>}}<tool_call|>',
        Parsed(calls=one(f"}}<tool_call|>{MARKS}")),
    ),
    "gemma: quotes of JSON": (
        "gemma4",
        '<|tool_call>call:get_time{city:"a, \\"b\\"}"}<tool_call|>',
        Parsed(calls=one('a, "b"}')),
    ),
    "python": (
        "lfm2",
        f"<|tool_call_start|>[get_time(city='{MARKS})]<|tool_call_end|>')]<|tool_call_end|>",
        Parsed(calls=one(f"{MARKS})]<|tool_call_end|>")),
    ),
    "deepseek": (
        "deepseek",
        "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>get_time<｜tool▁sep｜>"
        '{"city": "<｜tool▁call▁end｜>"}<｜tool▁call▁end｜><｜tool▁calls▁end｜>',
        Parsed(calls=one("<｜tool▁call▁end｜>")),
    ),
    # Calls beside each other.
    "two in a tag": ("hermes", f"<tool_call>{JSON}\n{JSON}</tool_call>", Parsed(calls=TWO)),
    "two tags": ("hermes", f"<tool_call>{JSON}<tool_call>{JSON}", Parsed(calls=TWO)),
    "two of Mistral": ("mistral", f"[TOOL_CALLS][{JSON}][TOOL_CALLS][{JSON}]", Parsed(calls=TWO)),
    "two of Gemma": (
        "gemma4",
        "<|tool_call>call:get_time{}<|tool_call>call:get_time{}<tool_call|>",
        Parsed(calls=TWO),
    ),
    "two of Kimi": (
        "kimi-k2",
        f"<|tool_calls_section_begin|>{KIMI_CALL}{KIMI_CALL}",
        Parsed(calls=(("get_time", {}, "functions.get_time:0"),) * 2),
    ),
    "without a marker": ("qwen3-coder", FUNCTION, Parsed(calls=one())),
    "a closing marker alone": ("qwen3-coder", f"{FUNCTION}\n</tool_call>", Parsed(calls=one())),
    "two without a marker": (
        "qwen3-coder",
        f"A\n{FUNCTION}\n{FUNCTION}\n</tool_call>\nB",
        Parsed("AB", calls=one() * 2),
    ),
    "without a marker, of another tool": (
        "qwen3-coder", "Write <function=f></function>.", Parsed("Write <function=f></function>.")
    ),
    "text between": (
        "hermes",
        f"A <tool_call>{JSON}</tool_call> B <tool_call>{JSON}</tool_call> C",
        Parsed("ABC", calls=TWO),
    ),
    # Thinking.
    "never ends": ("qwen3", f"<think>So {JSON} and", Parsed(thinking=f"So {JSON} and")),
    "ended by a call": (
        "qwen3",
        f"<think>So\n<tool_call>{JSON}</tool_call>\n<tool_call>{JSON}</tool_call>",
        Parsed("", "So", TWO),
    ),
    "ended by a call, then by its tag": (
        "qwen3",
        f"<think>So <tool_call>{JSON}</tool_call>\n</think>\n\nHi </think>",
        Parsed("Hi </think>", "So", TWO[:1]),
    ),
    "ended by a call with parameters": (
        "qwen3.5",
        "<think>\nSo\n\n<tool_call>\n<function=get_time>\n<parameter=city>\nx\n</parameter>\n"
        "</function>\n</tool_call>",
        Parsed("", "So", one()),
    ),
    "ended by a call without a marker": (
        "qwen3.5", f"<think>So\n{FUNCTION}", Parsed("", "So", one())
    ),
    "ended by a section": (
        "kimi-k2-thinking",
        f"<think>So<|tool_calls_section_begin|>{KIMI_CALL}<|tool_calls_section_end|></think>",
        Parsed("", "So", (("get_time", {}, "functions.get_time:0"),)),
    ),
    "ended by a call, then enclosed": (
        "granite",
        f"<think>So<|tool_call|>{JSON}</think><response>Hi</response>",
        Parsed("Hi", "So", TWO[:1]),
    ),
    "ended twice": (
        "qwen3",
        f"<think>A<tool_call>{JSON}</tool_call>B<think>C<tool_call>{JSON}</tool_call></think>D",
        Parsed("BD", "AC", TWO),
    ),
    "markers of calls within": (
        "qwen3",
        f'<think>A\n<tool_call> or <tool_call>{{"name": "x</think>B<tool_call>{JSON}',
        Parsed("B", 'A\n<tool_call> or <tool_call>{"name": "x', TWO[:1]),
    ),
    "a call begun within": (
        "glm-4.6",
        "<think>A <tool_call>name<arg_key>key</arg_key><arg_value>b</think>C<tool_call>get_time",
        Parsed(
            "C<tool_call>get_time", "A <tool_call>name<arg_key>key</arg_key><arg_value>b"
        ),
    ),
    "a call within": (
        "qwen3",
        f"<think>{JSON} <tool_call>x</think>Hi<tool_call>{JSON}</tool_call>",
        Parsed("Hi", f"{JSON} <tool_call>x", TWO[:1]),
    ),
    "a piece of the end": ("qwen3", "<think>a </thin", Parsed(thinking="a </thin")),
    "enclosed": (
        "granite",
        "<think>a</think><response>It is </response> or not.</response>\n",
        Parsed("It is </response> or not.", "a"),
    ),
    "enclosed without thinking": ("granite", "<response>Hi</response>", Parsed("Hi")),
    # Names and types.
    "unknown tool": (
        "hermes",
        '<tool_call>{"name": "none", "arguments": {"city": 3}}</tool_call>',
        Parsed(calls=one(3, "none")),
    ),
    "unknown tool without a marker": (
        "llama",
        '{"name": "none", "parameters": {}}',
        Parsed('{"name": "none", "parameters": {}}'),
    ),
    "other types": (
        "qwen3-coder",
        "<tool_call><function=get_time><parameter=days>\nmany, 1\n</parameter></function>",
        Parsed(calls=(("get_time", {"days": "many, 1"}, None),)),
    ),
    # Unicode and line breaks.
    "unicode": (
        "hermes",
        '<tool_call>{"name": "get_time", "arguments": {"city": "👩‍👩‍👧 \\ud83d\\ude00 ﷽"}}',
        Parsed(calls=one("👩‍👩‍👧 😀 ﷽")),
    ),
    "CRLF in JSON": (
        "hermes",
        '<tool_call>\r\n{"name": "get_time",\r\n"arguments": {}}\r\n</tool_call>\r\n',
        Parsed(calls=TWO[:1]),
    ),
    "CRLF in parameters": (
        "qwen3-coder",
        "<tool_call>\r\n<function=get_time>\r\n<parameter=city>\r\na\r\nb\r\n</parameter>\r\n"
        "</function>\r\n</tool_call>",
        Parsed(calls=one("a\r\nb")),
    ),
    "a carriage return at the end": (
        "qwen3-coder",
        "<tool_call>\n<function=get_time>\n<parameter=city>\na\r\n</parameter>\n</function>\n"
        "</tool_call>",
        Parsed(calls=one("a\r")),
    ),
    # What follows a call.
    "harmony: more": (
        "harmony",
        "<|channel|>commentary to=functions.get_time<|message|>{} }<|call|>",
        Parsed("}", calls=TWO[:1]),
    ),
    "harmony: a declared tool": (
        "harmony",
        '<|channel|>commentary to=get_time <|constrain|>json<|message|>{"city": "x"}<|call|>',
        Parsed(calls=one()),
    ),
    "harmony: another recipient": (
        "harmony", "<|channel|>commentary to=user<|message|>{}<|end|>", Parsed("{}")
    ),
    "harmony: no arguments": (
        "harmony",
        "<|channel|>commentary to=functions.get_time<|message|><|call|><|start|>assistant"
        "<|channel|>commentary to=functions.get_time<|message|>\n<|call|>",
        Parsed(calls=TWO),
    ),
    "harmony: no arguments, without the end": (
        "harmony", "<|channel|>commentary to=functions.get_time<|message|>", Parsed(calls=TWO[:1])
    ),
    "harmony: no JSON": (
        "harmony", "<|channel|>commentary to=functions.get_time<|message|> <b>", Parsed(" <b>")
    ),
    "muse: more": (
        "muse",
        ' to=get_time<|message|><atem:function_calls><atem:invoke name="get_time"></atem:invoke>'
        "</atem:function_calls> or <|eot|>",
        Parsed("or ", calls=TWO[:1]),
    ),
    "muse: no calls": ("muse", " to=get_time<|message|> <atem:x><|eom|>", Parsed(" <atem:x>")),
    "muse: no message": ("muse", " to=user", Parsed(" to=user")),
    "null": (
        "hermes",
        '<tool_call>{"name": "get_time", "arguments": null}</tool_call>',
        Parsed(calls=TWO[:1]),
    ),
    "excess braces": (
        "hermes",
        f"<tool_call>\n{JSON}}}\n</tool_call>\n<tool_call>{JSON} }}}}",
        Parsed(calls=TWO),
    ),
    "braces that are text": (
        "hermes", f"<tool_call>{JSON}}} is a call.", Parsed("} is a call.", calls=TWO[:1])
    ),
    "a large number": (
        "qwen3-coder",
        "<tool_call><function=get_time><parameter=days>1e999</parameter></function></tool_call>",
        Parsed(calls=(("get_time", {"days": 1.7976931348623157e308}, None),)),
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", HOSTILE)
def test_a_hostile_reply_is_separated_however_it_is_cut(case: str) -> None:
    name, text, expected = HOSTILE[case]
    form = format_of(TEMPLATES[name])
    for step in (1, 7, len(text)):
        pieces = [text[at : at + step] for at in range(0, len(text), step)]
        assert parsed(replied(form, pieces)) == expected


@pytest.mark.parametrize("name", ["user", "self"])
def test_a_tool_of_muse_may_have_the_name_of_another_recipient(name: str) -> None:
    call = f'<atem:function_calls><atem:invoke name="{name}"></atem:invoke></atem:function_calls>'
    begin = "<|eom|><|start|>assistant"
    text = f" to=self<|message|>R{begin} to=user<|message|> T{begin} to={name}<|message|>{call}"
    found = parsed(replied(format_of(TEMPLATES["muse"]), list(text), tools={name: {}}))
    assert found == Parsed(" T", "R", ((name, {}, None),))


def test_under_a_grammar_a_call_has_its_marker() -> None:
    parser = format_of(TEMPLATES["qwen3-coder"]).parser(TOOLS, guided=True)
    assert parsed([*parser.feed(FUNCTION), *parser.finish()]) == Parsed(FUNCTION)


@pytest.mark.parametrize("tools", [TOOLS, {}])
def test_a_grammar_or_a_request_without_tools_keeps_calls_in_thinking(tools: Any) -> None:
    text = f"So <tool_call>{JSON}</tool_call> and"
    parser = format_of(TEMPLATES["qwen3"]).parser(tools, thinks=True, guided=bool(tools))
    assert parsed([*parser.feed(text), *parser.finish()]) == Parsed(thinking=text)


def test_a_call_in_thinking_is_reported_when_it_is_complete() -> None:
    parser = format_of(TEMPLATES["qwen3"]).parser(TOOLS, thinks=True)
    head, tail = JSON[:-1], JSON[-1:]
    assert parser.feed(f"So <tool_call>{head}") == [Thinking("So")]
    assert [type(event) for event in parser.feed(tail)] == [CallBegin, CallArguments, CallEnd]


LONG = "a'b " * 10_000
NUMBERS = f"[{', '.join(['1', 'None'] * (MAX_LITERAL // 100))}]"


@pytest.mark.parametrize("together", [True, False])
@pytest.mark.parametrize(
    ("name", "text", "value"),
    [
        ("hermes", f'<tool_call>{{"name": "get_time", "arguments": {{"city": "{LONG}"}}}}', LONG),
        ("lfm2", f'<|tool_call_start|>[get_time(city="{LONG}")]', LONG),
        ("gemma4", f'<|tool_call>call:get_time{{city:<|"|>{LONG}<|"|>}}', LONG),
        ("lfm2", f"<|tool_call_start|>[get_time(deep={NUMBERS})]", eval(NUMBERS)),
        (
            "qwen3-coder",
            f"<tool_call><function=get_time><parameter=list>{NUMBERS}</parameter></function>",
            eval(NUMBERS),
        ),
    ],
    ids=["json", "python", "gemma", "items", "literal"],
)
def test_long_arguments_are_read_whole(name: str, text: str, value: Any, together: bool) -> None:
    """Reading takes time in proportion to the length, so this ends."""
    step = len(text) if together else 50
    pieces = [text[at : at + step] for at in range(0, len(text), step)]
    tools = {"get_time": {"properties": {"list": {"type": "array"}}}}
    ((_, arguments, _),) = parsed(replied(format_of(TEMPLATES[name]), pieces, tools=tools)).calls
    assert [*arguments.values()] == [value]


CALLING = [name for name in REPLIES if REPLIES[name][2].calls and "Paris" in REPLIES[name][1]]


@pytest.mark.parametrize("name", CALLING)
def test_texts_of_arguments_are_passed_on_as_they_arrive(name: str) -> None:
    template, reply, _ = REPLIES[name]
    parser = format_of(template).parser(TOOLS)
    events = parser.feed(reply[: reply.index("Paris") + 3])
    arguments = "".join(event.json for event in events if isinstance(event, CallArguments))
    assert arguments.replace(" ", "").endswith('"city":"Par')


@pytest.mark.parametrize("name", TEMPLATES)
def test_text_that_cannot_be_markup_is_passed_on_at_once(name: str) -> None:
    form = format_of(TEMPLATES[name])
    if form.of_messages:
        pytest.skip("a header precedes the text")
    parser = form.parser(TOOLS)
    assert parser.feed("Well") == [Text("Well")]
    assert parser.feed(", (a b") == [Text(", (a b")]


@pytest.mark.parametrize(
    "text", ['{"colour": ', '{"name": "Ann"', "[1", '[{"name": "Ann"', '{"type": "cat", "age"']
)
def test_json_that_is_no_call_is_passed_on_as_soon_as_it_is_certain(text: str) -> None:
    parser = format_of(TEMPLATES["llama"]).parser(TOOLS)
    events = [event for char in text for event in parser.feed(char)]
    assert parsed(events).text == text.rstrip()


@pytest.mark.parametrize("name", [n for n in TEMPLATES if not format_of(TEMPLATES[n]).of_messages])
@settings(max_examples=10, deadline=None, database=None, derandomize=True)
@given(data=st.data())
def test_replies_without_calls_lose_markup_alone(name: str, data: st.DataObject) -> None:
    form = format_of(TEMPLATES[name])
    words = st.text('ab{}:"1é\n', min_size=1, max_size=4)
    pieces = data.draw(st.lists(st.one_of(st.sampled_from(sorted(form.markup)), words), max_size=6))
    cut = replied(form, list("".join(pieces)))
    assert parsed(cut) == parsed(replied(form, ["".join(pieces)]))
    if not parsed(cut).calls:
        said = "".join(e.text for e in cut if isinstance(e, Text | Thinking | CallAborted))
        assert without(form.markup, said) == without(form.markup, "".join(pieces))


def without(markup: frozenset[str], text: str) -> str:
    """The text without markers and white space."""
    for marker in sorted(markup, key=len, reverse=True):
        text = text.replace(marker, "")
    return "".join(text.split())
