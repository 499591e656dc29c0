"""Calls of MiniMax M3: elements that are nested like the values of arguments."""

import json
from typing import Any

import jsonschema
import pytest

from model_zoo.chat.formats.allowed_calls import AllowedCalls
from model_zoo.chat.formats.element_calls import MARK, ElementArguments
from model_zoo.chat.formats.events import CallArguments, CallBegin, Text
from model_zoo.chat.formats.lark import LarkGrammar
from model_zoo.chat.formats.reply_format import format_of
from model_zoo.chat.formats.schema_place import Place
from tests.reply_transcripts import REPLIES
from tests.unit.model_zoo.chat.test_reply_grammars import Family

TEMPLATE = REPLIES["minimax-m3"][0]
PLACE = {
    "type": "object",
    "properties": {
        "name": {"type": "string"},
        "at": {"type": "array", "items": {"type": "number"}},
    },
    "required": ["name", "at"],
    "additionalProperties": False,
}
SCHEMA = {
    "type": "object",
    "properties": {
        "places": {"type": "array", "items": {"$ref": "#/$defs/place"}, "maxItems": 2},
        "first": {"$ref": "#/$defs/place"},
        "note": {"type": ["string", "null"], "maxLength": 3},
        "depth": {"type": "integer", "maximum": 9},
    },
    "required": ["places", "depth"],
    "additionalProperties": False,
    "$defs": {"place": PLACE},
}


def written(text: str, schema: Any = SCHEMA) -> Any:
    """The arguments of a call of `find`, without the marker before each tag, however it is cut."""
    tagged = f'<tool_call>\n<invoke name="find">{text}</invoke>\n</tool_call>'.replace(
        "<", f"{MARK}<"
    )
    whole, cut = (arguments(pieces, schema) for pieces in ([tagged], list(tagged)))
    assert whole == cut
    return whole


def arguments(pieces: list[str], schema: Any) -> Any:
    parser = format_of(TEMPLATE).parser({"find": schema})
    events = [event for piece in pieces for event in parser.feed(piece)] + [*parser.finish()]
    if not any(isinstance(event, CallBegin) for event in events):
        return "".join(event.text for event in events if isinstance(event, Text))
    return json.loads("".join(e.json for e in events if isinstance(e, CallArguments)))


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (
            "<places><item><name>A</name><at><item>1</item>\n<item>2.5</item></at></item></places>"
            "<depth>3</depth>",
            {"places": [{"name": "A", "at": [1, 2.5]}], "depth": 3},
        ),
        ("<places></places><first> </first>", {"places": [], "first": {}}),
        ('<places>[{"name": "A", "at": []}]</places>', {"places": [{"name": "A", "at": []}]}),
        ("<note>null</note>", {"note": None}),
        ("<other><x>1</x></other>", {"other": {"x": "1"}}),
        ("<other>text</other>", {"other": "text"}),
        ("", {}),
    ],
)
def test_elements_are_values_of_the_schema(text: str, expected: Any) -> None:
    assert written(text) == expected


def test_a_text_may_look_like_elements() -> None:
    schema = {"properties": {"code": {"type": "string"}}}
    assert written("<code><b>x</b></code>", schema) == {"code": f"{MARK}<b>x{MARK}</b>"}


@pytest.mark.parametrize(
    ("schema", "text", "expected"),
    [
        ({"properties": {"item": {}}}, "<item>A</item>", {"item": "A"}),
        (
            {"properties": {"item": {}, "count": {"type": "integer"}}},
            "<item>A</item><count>2</count>",
            {"item": "A", "count": 2},
        ),
        ({}, "<item>A</item><count>2</count>", {"item": "A", "count": "2"}),
        ({"allOf": [{"$ref": "#/$defs/numbers"}]}, "<item>1</item>", [1]),
        ({"$ref": "#/$defs/same"}, "<item>1</item>", [1]),
        ({"anyOf": [{"$ref": "#/$defs/numbers"}, {"type": "null"}]}, "<item>1</item>", [1]),
        ({"prefixItems": [{"type": "integer"}]}, "<item>1</item><item>1</item>", [1, "1"]),
    ],
)
def test_the_schema_tells_lists_from_objects_with_a_member_called_item(schema, text, expected):
    numbers = {"type": "array", "items": {"type": "integer"}}
    definitions = {"numbers": numbers, "same": {"$ref": "#/$defs/numbers"}}
    whole = {"properties": {"value": schema}, "$defs": definitions}
    assert written(f"<value>{text}</value>", whole) == {"value": expected}


@pytest.mark.parametrize("text", ["<depth>3", "<places><item></places>", "<a>" * 200])
def test_elements_that_are_not_closed_end_the_call(text: str) -> None:
    parser = format_of(TEMPLATE).parser({"find": SCHEMA})
    tagged = f'<tool_call><invoke name="find">{text}'.replace("<", f"{MARK}<")
    events = [*parser.feed(tagged), *parser.finish()]
    assert sum(isinstance(event, CallBegin) for event in events) <= 1


@pytest.mark.parametrize("seed", range(8))
def test_replies_under_the_grammar_follow_the_schema(seed: int) -> None:
    family = Family(TEMPLATE, "control")
    calls = AllowedCalls({"find": SCHEMA}, required=True, parallel=False)
    reply = family.reply(family.grammar(calls=calls, thinking=False), seed)
    if reply is not None:  # lists may be long
        jsonschema.validate(arguments([reply], SCHEMA), SCHEMA)


def listed(items: Any) -> Any:
    return {"type": "array", "items": items, "maxItems": 2}


DIGIT = {"type": "integer", "minimum": 0, "maximum": 9}
ORDER = {
    "type": "object",
    "properties": {"item": DIGIT, "parts": listed({"$ref": "#/$defs/order"})},
    "required": ["item"],
    "additionalProperties": False,
}


@pytest.mark.parametrize(
    "schema",
    [
        {"$ref": "#/$defs/order"},
        {"type": "object", "properties": {"a": False, "b": True}, "additionalProperties": False},
        {"allOf": [listed(DIGIT)]},
        {"anyOf": [listed(DIGIT), listed({"type": "boolean"})]},
        {"anyOf": [listed({"type": "number"}), {"type": "array", "prefixItems": [DIGIT]}]},
    ],
)
def test_nested_values_under_the_grammar_follow_the_schema(schema: Any) -> None:
    """Recursive objects, whose first member has the name of items, and lists that are combined."""
    whole = {"type": "object", "properties": {"value": schema}, "required": ["value"]}
    whole |= {"$defs": {"order": ORDER}, "additionalProperties": False}
    family = Family(TEMPLATE, "control")
    calls = AllowedCalls({"find": whole}, required=True, parallel=False)
    grammar = family.grammar(calls=calls, thinking=False)
    for seed in range(12):
        reply = family.reply(grammar, seed)
        if reply is not None:
            jsonschema.validate(arguments([reply], whole), whole)


def test_rules_of_parts_that_refer_to_each_other_are_written_once_a_level() -> None:
    names = [f"d{index}" for index in range(12)]
    members = {name: {"$ref": f"#/$defs/{name}"} for name in names}
    whole: Any = {"type": "object", "properties": members, "additionalProperties": False}
    lark = LarkGrammar({})
    ElementArguments().rule(lark, Place.whole({**whole, "$defs": dict.fromkeys(names, whole)}))
    assert len(lark.rules) < 9 * len(names) * (len(names) + 3)
