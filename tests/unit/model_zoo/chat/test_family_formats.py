"""The formats of single families: replies cut anywhere, malformed calls, arguments in pieces."""

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from model_zoo.chat.formats.events import CallArguments, CallBegin, CallEnd, Text
from model_zoo.chat.formats.reply_format import ReplyFormat, format_of
from model_zoo.chat.formats.written_calls import with_written_calls
from model_zoo.chat.messages import Message, ToolCall
from tests.reply_parsing import PARIS, TOOLS, Parsed, parsed, replied
from tests.reply_transcripts import REPLIES


def form_of(name: str) -> ReplyFormat:
    return format_of(REPLIES[name][0])


@pytest.mark.parametrize("name", REPLIES)
def test_a_model_that_writes_thinking_has_that_capability(name):
    _, _, expected = REPLIES[name]
    assert form_of(name).thinks or not expected.thinking


@pytest.mark.parametrize("name", ["lfm2", "kimi-k2", "granite-4", "functionary-3.2", "llama4"])
def test_a_model_whose_template_knows_no_thinking_lacks_that_capability(name):
    assert not form_of(name).thinks


# Formats without thinking and without markers that are dropped.
PLAIN = ("kimi-k2", "lfm2", "gemma3-tool-code", "minimax-m1", "functionary-3.1", "firefunction")


@pytest.mark.parametrize("name", PLAIN)
@given(data=st.data())
def test_no_text_is_lost_or_added(name, data):
    _, reply, _ = REPLIES[name]
    pieces = data.draw(
        st.lists(
            st.one_of(
                st.tuples(st.integers(0, len(reply)), st.integers(0, len(reply))).map(
                    lambda ends: reply[slice(*sorted(ends))]
                ),
                st.sampled_from(sorted(form_of(name).markup)),
                st.text(max_size=5),
            ),
            max_size=4,
        )
    )
    cut, once = (
        parsed(replied(form_of(name), pieces)),
        parsed(replied(form_of(name), ["".join(pieces)])),
    )
    assert cut == once
    if not once.calls:
        assert once.text == "".join(pieces)


@pytest.mark.parametrize("name", ["granite-3.3", "granite-4", "lfm2", "nemotron-mini"])
def test_calls_of_earlier_turns_are_written_as_they_are_parsed(name):
    calls = (ToolCall("get_weather", PARIS), ToolCall("get_time", {"city": "x"}))
    (turn,) = with_written_calls([Message("assistant", "TT", tool_calls=calls)], form_of(name).name)
    expected = tuple((call.name, call.arguments, None) for call in calls)
    assert parsed(replied(form_of(name), [turn.text])) == Parsed("TT", calls=expected)


def test_a_declared_tool_with_the_name_of_a_made_up_one_is_called():
    _, reply, _ = REPLIES["command-r without a call"]
    found = parsed(replied(form_of("command-r"), [reply], tools={"directly_answer": {}}))
    assert found == Parsed(calls=(("directly_answer", {}, None),))


def test_a_text_argument_is_passed_on_as_it_arrives():
    parser = form_of("glm-4.6").parser(TOOLS)
    assert parser.feed("<tool_call>get_time\n<arg_key>ci") == [CallBegin(0, "get_time")]
    assert parser.feed("ty</arg_key>\n<arg_value>Par") == [CallArguments(0, '{"city": "Par')]
    assert parser.feed('is "') == [CallArguments(0, 'is \\"')]
    assert parser.feed("</arg_value>") == [CallArguments(0, '"')]
    assert parser.feed("</tool_call>") == [CallArguments(0, "}"), CallEnd(0)]


def test_python_arguments_are_passed_on_as_they_arrive():
    parser = form_of("lfm2").parser(TOOLS)
    assert parser.feed("So<|tool_call_start|>[get_time(ci") == [
        Text("So"),
        CallBegin(0, "get_time"),
        CallArguments(0, "{"),
    ]
    assert parser.feed("ty='Par") == [CallArguments(0, '"city": "Par')]
    assert parser.feed("is', days=1") == [CallArguments(0, 'is", "days": ')]
    assert parser.feed("2)]") == [CallArguments(0, "12}"), CallEnd(0)]


def test_gemma_4s_arguments_are_passed_on_as_they_arrive():
    parser = format_of("tools <|tool_call>").parser(TOOLS)
    assert parser.feed('<|tool_call>call:get_time{city:<|"|>Par') == [
        CallBegin(0, "get_time"),
        CallArguments(0, '{"city": "Par'),
    ]


@pytest.mark.parametrize(
    ("kind", "written", "value"),
    [
        ({"type": "string"}, "3", "3"),
        ({"type": "integer"}, "3", 3),
        ({"type": "boolean"}, "True", True),
        ({"type": ["string", "null"]}, "3", "3"),
        ({"type": ["string", "null"]}, "null", None),
        ({"anyOf": [{"type": "integer"}, {"type": "null"}]}, "None", None),
        ({"anyOf": [{"type": "string"}, {"type": "integer"}]}, "3", "3"),
        ({"type": "array"}, "['a', 1]", ["a", 1]),
        ({"type": "array"}, "[open('/etc/passwd')]", "[open('/etc/passwd')]"),
        ({"type": "object"}, "{1, 2}", "{1, 2}"),
        ({"type": "number"}, "NaN", "NaN"),
        ({"enum": ["3"]}, "3", "3"),
        ({}, "3", "3"),
        ("nonsense", "3", "3"),
        ({"const": 3}, "3", 3),
        ({"$ref": "#/$defs/count"}, "3", 3),
        ({"allOf": [{"$ref": "#/$defs/count"}], "description": "d"}, "3", 3),
        ({"anyOf": [{"$ref": "#/$defs/count"}, {"$ref": "#/$defs/name"}]}, "3", "3"),
        ({"$ref": "#/$defs/missing"}, "3", "3"),
        ({"$ref": "#/$defs/loop"}, "3", "3"),
        ({"type": "array"}, '["a</arg_value>b"]', ["a</arg_value>b"]),
        ({"type": "array"}, "['\"']", ['"']),
    ],
)
def test_the_schema_says_whether_a_value_is_text(kind: Any, written: str, value: Any):
    definitions = {
        "count": {"type": "integer"},
        "name": {"type": "string"},
        "loop": {"anyOf": [{"$ref": "#/$defs/loop"}] * 20},
    }
    schema = {"type": "object", "properties": {"city": kind}, "$defs": definitions}
    tools = {"get_time": schema}
    reply = (
        f"<tool_call>get_time<arg_key>city</arg_key><arg_value>{written}</arg_value></tool_call>"
    )
    (call,) = parsed(replied(form_of("glm-4.6"), [reply], tools=tools)).calls
    assert call[1] == {"city": value}


@pytest.mark.parametrize(
    ("written", "value"),
    [
        ('parameter name="city" string="true">3</｜DSML｜parameter>', "3"),
        ('parameter name="city" string="false">3</｜DSML｜parameter>', 3),
        ('parameter name="city" string="false">{"a": [1]}</｜DSML｜parameter>', {"a": [1]}),
    ],
)
def test_attributes_say_whether_a_value_is_text(written: str, value: Any):
    reply = (
        '<｜DSML｜function_calls>\n<｜DSML｜invoke name="get_time">\n'
        f"<｜DSML｜{written}\n</｜DSML｜invoke>\n</｜DSML｜function_calls>"
    )
    (call,) = parsed(replied(form_of("deepseek-v3.2"), [reply])).calls
    assert call[1] == {"city": value}


@pytest.mark.parametrize(
    ("written", "arguments"),
    [
        ("call:get_time{city:None}", {"city": None}),
        ("call:get_time{a:True,b:False,c:true}", {"a": True, "b": False, "c": True}),
        ('call:get_time{city: <|"|>Paris<|"|>, days: 3}', {"city": "Paris", "days": 3}),
        ('call:get_time{\n  city:<|"|>Paris<|"|>\n}', {"city": "Paris"}),
        (" call: get_time {\n}\n", {}),
        (
            'call:get_time{edits:[\n  {newText:<|"|># G\n<|"|>,\n   oldText:<|"|>u<|"|>}\n]}',
            {"edits": [{"newText": "# G\n", "oldText": "u"}]},
        ),
        (
            "call:get_time{deep:{ list : [ 1 , 2 ] , none : [ ] } }",
            {"deep": {"list": [1, 2], "none": []}},
        ),
        ('call:get_time{"city":<|"|>x<|"|>, "a b" : 1}', {"city": "x", "a b": 1}),
        ("call:get_time{days:1e999}", {"days": 1.7976931348623157e308}),
    ],
)
@pytest.mark.parametrize("closer", ["<tool_call|>", "<tool_call|><tool_call|>\n"])
def test_gemma_4s_calls_have_white_space_and_markers_as_the_model_writes_them(
    written: str, arguments: Any, closer: str
):
    reply = f"<|tool_call>{written}{closer}"
    form = format_of("tools <|tool_call>")
    for pieces in ([reply], list(reply)):
        assert parsed(replied(form, pieces)) == Parsed(calls=(("get_time", arguments, None),))
