"""Schemas rewritten as plain alternatives, without combining keywords, against jsonschema."""

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jsonschema import Draft202012Validator

from model_zoo.chat.formats.lark import Unwritable
from model_zoo.chat.formats.plain_schemas import plain
from model_zoo.chat.formats.schema_place import Place

VALUES: list[Any] = [
    None, True, False, 0, 1, 2, 4, 6, 12, -3, 1.0, 2.5, "", "a", "bb", "ccc", [], [1], ["a"],
    [1, "a"], [1, 2, 3], [None, 6], [True, "bb"], {}, {"a": 1}, {"a": "bb"}, {"b": 2},
    {"a": 6, "b": 6}, {"a": None, "c": 1}, {"c": "a"}, {"a": {"a": 1}}, {"a": [1]}, {"x1": 1},
    {"a": 1, "x1": "a"},
]  # fmt: skip
NAMES = st.sampled_from(["a", "b", "c"])
TYPES = st.sampled_from(
    ["string", "integer", "number", "boolean", "null", "array", "object", ["integer", "null"],
     ["string", "object", "number"], ["array", "object"]]
)  # fmt: skip
COUNTS = st.integers(0, 3)
DEFINITIONS = {
    "count": {"type": "integer", "minimum": 1},
    "tree": {"properties": {"a": {"$ref": "#/$defs/tree"}}, "required": ["a"]},
    "either": {"anyOf": [{"$ref": "#/$defs/count"}, {"type": "null"}]},
}
REFERENCES = st.sampled_from([{"$ref": f"#/$defs/{name}"} for name in DEFINITIONS])


LEAVES = st.sampled_from(
    [True, False, {}, {"type": "integer"}, {"type": "string"}, {"const": 1}, {"minimum": 2}]
)
# Keywords that limit the same values.
GROUPS: list[dict[str, st.SearchStrategy[Any]]] = [
    {"type": TYPES, "minimum": COUNTS, "exclusiveMaximum": COUNTS.map(lambda n: n + 4)},
    {"multipleOf": st.sampled_from([4, 6])},
    {"type": TYPES, "minLength": COUNTS, "maxLength": COUNTS, "pattern": st.sampled_from("ab")},
    {"enum": st.lists(st.sampled_from(VALUES), min_size=3, max_size=9), "type": TYPES},
    {"const": st.sampled_from(VALUES), "enum": st.just(VALUES[::2])},
    {"minItems": COUNTS, "maxItems": COUNTS},
    {"items": LEAVES, "prefixItems": st.lists(LEAVES, min_size=1, max_size=2)},
    {
        "properties": st.dictionaries(NAMES, LEAVES, min_size=1, max_size=2),
        "additionalProperties": LEAVES,
    },
    {
        "required": st.lists(NAMES, max_size=2, unique=True),
        "minProperties": COUNTS,
        "maxProperties": COUNTS,
    },
    {"patternProperties": st.fixed_dictionaries({"^x": LEAVES}), "required": st.just(["a"])},
]


@st.composite
def combining(draw: st.DrawFn) -> dict[str, Any]:
    """Parts of the same keywords, as siblings, in `allOf`, `anyOf` and by reference."""
    group = draw(st.sampled_from(GROUPS))
    part = st.fixed_dictionaries({}, optional=group)
    schema: dict[str, Any] = draw(part)
    schema["allOf"] = [draw(part) for _ in range(draw(st.integers(1, 2)))]
    if draw(st.booleans()):
        schema["anyOf"] = [draw(part), draw(st.one_of(part, REFERENCES))]
    return schema | draw(st.sampled_from([{}, {}, {"$ref": "#/$defs/either"}]))


@given(combining())
@settings(max_examples=300, deadline=None, database=None, derandomize=True)
def test_alternatives_allow_what_the_schema_allows(schema: Any) -> None:
    root = {"$defs": DEFINITIONS, **schema}
    try:
        alternatives = plain(Place.whole(root))
    except Unwritable:
        return
    assert all("allOf" not in each.schema and "$ref" not in each.schema for each in alternatives)
    whole = Draft202012Validator(root)
    each = [Draft202012Validator({**a.schema, "$defs": DEFINITIONS}) for a in alternatives]
    for value in VALUES:
        assert any(one.is_valid(value) for one in each) == whole.is_valid(value), value


@pytest.mark.parametrize(
    ("schema", "reason"),
    [
        ({"allOf": [{"pattern": "a"}, {"pattern": "b"}]}, 'several "pattern"'),
        ({"allOf": [{"not": {}}, {}]}, '"not"'),
        ({"$ref": "#/$defs/none"}, "does not refer"),
        ({"$ref": "#"}, "too many"),
        ({"allOf": [{"anyOf": [{"minimum": n} for n in range(9)]}] * 9}, "too many"),
        (
            {"anyOf": [{"$ref": "#/$defs/d"}] * 9, "$defs": {"d": {"anyOf": [True] * 50}}},
            "too many",
        ),
        ({"oneOf": [{"minimum": n} for n in range(201)]}, '"oneOf" has too many alternatives'),
        ({"allOf": [{"patternProperties": {"x": {}}}, {"properties": {"x": {}}}]}, "patternProp"),
    ],
)
def test_schemas_without_plain_alternatives_are_refused(
    schema: dict[str, Any], reason: str
) -> None:
    with pytest.raises(Unwritable, match=reason):
        plain(Place.whole(schema))


PARTS = {
    "allOf": [{"properties": {"a": {"type": ["integer", "string"]}}}],
    "properties": {"a": {"type": ["integer", "null"]}, "b": {}},
    "anyOf": [{"properties": {"c": {"type": "string"}}}, {"properties": {"c": {"type": "null"}}}],
    "additionalProperties": {"type": ["null", "number"]},
}
PATTERNS = {"patternProperties": {"^x": {"type": "null"}, "^y": {"type": "number"}}}


@pytest.mark.parametrize(
    ("schema", "name", "types"),
    [
        (PARTS, "a", {"number"}),
        (PARTS, "b", None),
        (PARTS, "c", {"null"}),
        (PARTS, "other", {"null", "number"}),
        (PATTERNS, "x", {"null", "number"}),  # patterns are not matched where replies are read
    ],
)
def test_types_of_a_member_come_from_all_parts_of_a_schema(
    schema: Any, name: str, types: Any
) -> None:
    assert Place.whole(schema).member(name).types() == types
