"""Schemas are rewritten without keywords that grammars lack."""

import json
import re
import sys
import tracemalloc
from typing import Any
from urllib.parse import urljoin

import jsonschema
import pytest
from referencing.jsonschema import EMPTY_REGISTRY

from model_zoo.grammars.equal_schemas import MAX_REPEATED_CHARACTERS, simplified
from model_zoo.grammars.json_schema import check_references, compilable
from model_zoo.grammars.token_grammar import GrammarError, check, followed


def error_of(schema: Any) -> str | None:
    try:
        check(json.dumps({"grammars": [{"json_schema": compilable(schema)}]}))
    except GrammarError as error:
        return str(error)
    return None


def check_texts(schema: Any, good: list[str], bad: list[str]) -> None:
    """The grammar and a validator agree about these JSON texts."""
    check_references("format", schema)
    found = followed(compilable(schema), [*good, *bad])
    assert found == [True] * len(good) + [False] * len(bad)
    formats = jsonschema.FormatChecker()
    validator = jsonschema.Draft202012Validator(
        schema, registry=EMPTY_REGISTRY, format_checker=formats
    )
    for text, accepted in zip([*good, *bad], found, strict=True):
        assert validator.is_valid(json.loads(text)) is accepted, text


ANYTHING = {"additionalProperties": {"type": "integer"}}
INTEGER, CLOSED = {"type": "integer"}, {"additionalProperties": False}
NAMED = [
    ({"propertyNames": True, **ANYTHING}, ['{"x": 1}'], ['{"x": "1"}']),
    ({"propertyNames": {"type": "string", "title": "T"}}, ['{"x": 1}'], ["[]"]),
    (
        {"propertyNames": {"type": "string", "enum": ["a", "b"]}, "required": ["a"], **ANYTHING},
        ['{"a": 1}', '{"a": 1, "b": 2}'],
        ["{}", '{"a": 1, "c": 2}', '{"a": "1"}'],
    ),
    ({"propertyNames": {"const": "a"}}, ["{}", '{"a": []}'], ['{"b": 1}']),
    ({"propertyNames": {"pattern": "^x-"}, **ANYTHING}, ['{"x-a": 1}'], ['{"a": 1}']),
    ({"properties": {"a": {}}, "unevaluatedProperties": False}, ['{"a": 1}'], ['{"b": 1}']),
    ({"unevaluatedProperties": {"type": "integer"}}, ['{"a": 1}'], ['{"b": "1"}']),
    (
        {"propertyNames": {"enum": ["a"]}, "unevaluatedProperties": {"type": "integer"}},
        ['{"a": 1}'],
        ['{"a": "1"}', '{"b": 1}'],
    ),
    (
        {"properties": {"a": {"anyOf": [{"not": {}}, {"type": "integer"}]}, "b": {"not": True}}},
        ["{}", '{"a": 1}'],
        ['{"a": "1"}', '{"b": 1}'],
    ),
    ({"properties": {"a": {}}, "additionalProperties": {"not": {}}}, ['{"a": 1}'], ['{"b": 1}']),
    (
        {"propertyNames": {"enum": ["a"]}, "properties": {"a": {"const": 1}, "b": {}}},
        ['{"a": 1}'],
        ['{"a": 2}', '{"b": 1}'],
    ),
    ({"propertyNames": {"minLength": 2, "maxLength": 3}}, ['{"ab": 1}'], ['{"a": 1}']),
    ({"propertyNames": {"format": "date"}}, ['{"2024-01-31": 1}'], ['{"a": 1}']),
    (
        {"propertyNames": {"$ref": "#/$defs/k"}, "$defs": {"k": {"enum": ["a"]}}},
        ['{"a": 1}'],
        ['{"b": 1}'],
    ),
    (
        {
            "allOf": [{"properties": {"a": {}}}, {"$ref": "#/$defs/b"}],
            "properties": {"c": {}},
            "unevaluatedProperties": False,
            "$defs": {"b": {"properties": {"b": {"type": "integer"}}}},
        },
        ["{}", '{"a": 1, "b": 2, "c": 1}'],
        ['{"b": "x"}', '{"d": 1}'],
    ),
    ({"properties": {"a": {}, "b": {}}, "minProperties": 1}, ['{"b": 1}', '{"a": 1}'], ["{}"]),
    (
        {"patternProperties": {"^a": INTEGER, "b$": INTEGER, "c.c": INTEGER}, **CLOSED},
        ['{"ab": 1, "axb": 2, "a": 1, "b": 2, "xb": 1, "-cxc-": 3}'],
        ['{"ab": "1"}', '{"x": 1}', '{"ba": 1}', '{"a": "1"}'],
    ),
    (
        {"patternProperties": {"^a": {"minimum": 5}, ".*": INTEGER, "^b": {}}, **CLOSED},
        ['{"a": 5, "b": 1, "c": 1}'],
        ['{"a": 4}', '{"a": "5"}', '{"b": "1"}', '{"c": "1"}'],
    ),
    (
        {"properties": {"d": {"maximum": 2}}, "patternProperties": {"^a": {}, "": INTEGER}},
        ['{"d": 2, "e": 3}'],
        ['{"d": 3}', '{"d": "1"}', '{"e": "1"}', '{"a": []}'],
    ),
    ({"patternProperties": {"^a": INTEGER, "": True, "^.*$": True}}, ['{"x": []}'], ['{"a": ""}']),
    (
        {"properties": {"a": {}, "b": {}}, "minProperties": 1, **ANYTHING},
        ['{"b": 1}', '{"a": 1, "c": 1}', '{"c": 1}'],
        ["{}", '{"c": "1"}'],
    ),
]


@pytest.mark.parametrize(("schema", "good", "bad"), NAMED)
def test_keywords_for_members_are_replaced_by_equal_ones(schema, good, bad) -> None:
    check_texts({"type": "object", **schema}, good, bad)


TEXT, ONE, TWO = {"type": "string"}, '{"kind": "a", "x": "t"}', '{"kind": "b"}'
KIND = {"type": "object", "properties": {"kind": {"enum": ["a", "b", 3]}, "x": TEXT}}
IF_A = {"properties": {"kind": {"const": "a"}}, "required": ["kind"]}
PAIR = {"type": "object", "properties": {"a": TEXT, "b": TEXT}}
A, B, BOTH = '{"a": ""}', '{"b": ""}', '{"a": "", "b": ""}'
CONDITIONS: list[Any] = [
    ({**KIND, "if": IF_A, "then": {"required": ["x"]}}, [ONE, TWO, "{}"], ['{"kind": "a"}']),
    (
        {**KIND, "if": IF_A, "then": {"required": ["x"]}, "else": {"properties": {"x": False}}},
        [ONE, TWO, '{"kind": 3}'],
        ['{"kind": "b", "x": "t"}'],
    ),
    (
        {**KIND, "allOf": [{"if": IF_A, "then": {"properties": {"x": {"const": "t"}}}}]},
        [ONE],
        ['{"kind": "a", "x": "u"}'],
    ),
    ({**KIND, "if": IF_A}, ['{"kind": "a"}'], ['{"kind": "c"}']),
    ({**PAIR, "dependentRequired": {"a": ["b"]}}, ["{}", B, BOTH], [A]),
    (
        {**PAIR, "dependentSchemas": {"a": {"properties": {"b": {"const": ""}}}}},
        [A, BOTH, '{"b": "x"}'],
        ['{"a": "", "b": "x"}'],
    ),
    ({**PAIR, "oneOf": [{"required": ["a"]}, {"required": ["b"]}]}, [A, B], ["{}", BOTH]),
    ({**PAIR, "not": {"required": ["a", "b"]}}, ["{}", A, B], [BOTH]),
    ({"not": {"type": ["null", "number"]}}, ["true", "[]"], ["null", "1.5"]),
    ({"type": ["string", "null"], "not": {"enum": ["a", "ab"]}}, ['""', '"b"', "null"], ['"ab"']),
    ({"type": "string", "not": {"const": "]^-"}}, ['"]^"', '"]^-."', '"\\n"'], ['"]^-"']),
    ({"type": "integer", "not": {"enum": [1, 2]}}, ["0", "3"], ["1", "2"]),
    ({"enum": [1, True, None, "a"], "not": {"enum": [True, "a"]}}, ["1", "null"], ["true", '"a"']),
    ({"type": "string", "not": {"maxLength": 1}}, ['"ab"'], ['"a"', '""']),
    ({"type": "integer", "not": {"const": 1, "enum": [2]}}, ["1", "2"], ['"a"']),
    ({"type": "number", "not": {"anyOf": [{"minimum": 5}, {"maximum": 1}]}}, ["4"], ["5", "1"]),
    ({"type": "integer", "not": {"not": {"maximum": 3}}}, ["3"], ["4"]),
    ({"oneOf": [TEXT, {"const": "a"}, {"type": "null"}]}, ['"b"', "null"], ['"a"', "1"]),
]


@pytest.mark.parametrize(("schema", "good", "bad"), CONDITIONS)
def test_conditions_become_alternatives(schema, good, bad) -> None:
    check_texts(schema, good, bad)


def test_dependencies_of_older_drafts_are_enforced() -> None:
    for dependent in (["b"], {"required": ["b"]}):
        schema = {**PAIR, "dependencies": {"a": dependent}}
        assert followed(compilable(schema), [B, BOTH, A]) == [True, True, False]


FEW = {"enum": ["a", "b", 1]}
ARRAYS = [
    ({"items": FEW, "uniqueItems": True}, ["[]", '["b", "a"]'], ['["a", "a"]', '["c"]']),
    ({"items": FEW, "uniqueItems": True, "minItems": 2}, ['["a", 1]'], ['["a"]']),
    ({"items": {"type": "boolean"}, "uniqueItems": True}, ["[true, false]"], ["[true, true]"]),
    ({"items": {"type": "integer"}, "contains": {"const": 1}}, ["[2, 1, 3]"], ["[]", "[2]"]),
    ({"contains": {"const": 1}, "minContains": 0}, ["[2]"], []),
]


@pytest.mark.parametrize(("schema", "good", "bad"), ARRAYS)
def test_different_and_contained_items(schema, good, bad) -> None:
    check_texts({"type": "array", **schema}, good, bad)
    both = {"type": ["array", "null"], **schema}
    check_texts(both, [*good, "null"], [*bad, "1"])


def test_arrays_without_a_list_of_items_may_repeat_some() -> None:
    """Other servers ignore `uniqueItems`, and refusing it would refuse every set of Pydantic."""
    schema = {"items": TEXT, "uniqueItems": True}
    assert followed(compilable(schema), ['["a", "a"]']) == [True]
    many = {"items": {"enum": [*range(9)]}, "uniqueItems": True}
    assert followed(compilable(many), ["[1, 1]", json.dumps([1] * 10)]) == [True, False]


def test_alternatives_that_cannot_be_told_apart_may_overlap() -> None:
    schema = {"oneOf": [{"type": "integer"}, {"type": "number"}, {"pattern": "a"}]}
    assert followed(compilable(schema), ["1", "1.5"]) == [True, True]


INTEGERS = [(-(2**63), 2**63 - 1), (None, 10**30), (0, 2**64 - 1), (-(10**30), None)]


@pytest.mark.parametrize(("low", "high"), INTEGERS)
@pytest.mark.parametrize("kind", ["integer", "number"])
def test_bounds_of_large_integers(kind: str, low: int | None, high: int | None) -> None:
    given = {"minimum": low, "maximum": high}
    schema = {"type": kind, **{key: bound for key, bound in given.items() if bound is not None}}
    bad = ["-1"] if low == 0 else []
    check_texts(schema, ["0", "7", str(10**18)], bad)


def test_bounds_of_doubles_do_not_exclude_large_numbers() -> None:
    largest = 1.7976931348623157e308
    check_texts({"type": "number", "minimum": -largest, "maximum": largest}, ["6.02e23", "-1"], [])


NODE = {"type": "object", "properties": {"v": {"type": "integer"}}, "required": ["v"]}
INNER = {**NODE, "properties": {"v": {"type": "integer"}, "next": {"$ref": "#/x"}}}
REFERENCES: list[Any] = [
    {"properties": {"b": {"$ref": "#/additionalProperties"}}, "additionalProperties": NODE},
    {"propertyNames": {"enum": ["b"]}, "additionalProperties": {
        **NODE, "properties": {"v": {"type": "integer"}, "w": {"$ref": "#/additionalProperties"}},
    }},
    {"properties": {"b": {"$ref": "#n"}}, "$defs": {"x": {"$anchor": "n", **NODE}}},
    {"properties": {"b": {"$ref": "#/$defs/x/$defs/y"}}, "$defs": {"x": {"$defs": {"y": NODE}}}},
    {"properties": {"b": {"$ref": "#/schemas/B/C"}}, "schemas": {"B": {"C": NODE}}},
    {"properties": {"b": {"$ref": "#/definitions/x"}}, "definitions": {"x": NODE}},
    {"$id": "https://e.com/s", "properties": {"b": {"$ref": "s#/$defs/x"}}, "$defs": {"x": NODE}},
    {"$id": "https://e.com/s", "properties": {"b": {"$ref": "x.json"}},
     "$defs": {"x": {"$id": "x.json", **NODE}}},
    {"properties": {"b": {"$ref": "urn:x#/$defs/y"}},
     "$defs": {"x": {"$id": "urn:x", "$defs": {"y": NODE}}}},
    {"properties": {"b": {"$dynamicRef": "#n"}}, "$defs": {"x": {"$dynamicAnchor": "n", **NODE}}},
    {"properties": {"b": {"$ref": "#n"}}, "$defs": {
        "x": {"$dynamicAnchor": "n", **NODE}, "y": {"$id": "urn:y", "$dynamicAnchor": "n"},
    }},
    {"properties": {"b": {"$ref": "#/x"}}, "x": INNER},
    {"properties": {"a": {"prefixItems": [NODE]}, "b": {"$ref": "#/properties/a/prefixItems/0"}}},
    {"properties": {"a%/~": NODE, "b": {"$ref": "#/properties/a%25~1~0"}}},
]  # fmt: skip


@pytest.mark.parametrize("schema", REFERENCES)
def test_references_lead_to_parts_however_they_are_written(schema) -> None:
    check_texts(
        {"type": "object", **schema}, ['{"b": {"v": 1}}'], ['{"b": {"v": "x"}}', '{"b": 1}']
    )


def test_a_schema_that_refers_to_itself_by_its_address() -> None:
    tree = {"$id": "https://e.com/t", "properties": {"next": {"$ref": "t"}, "v": {"type": "null"}}}
    check_texts(
        {"type": "object", **tree}, ['{"next": {"next": {"v": null}}}'], ['{"next": {"v": 1}}']
    )
    recursive = {"type": "object", "properties": {"next": {"$recursiveRef": "#"}}}
    assert followed(compilable(recursive), ['{"next": {}}', '{"next": 1}']) == [True, False]


def test_a_discriminator_is_required() -> None:
    """Otherwise a reply may omit the member that tells its type, if that has a default."""
    kinds = {
        kind: {"type": "object", "properties": {"k": {"const": kind, "default": kind}, kind: TEXT}}
        for kind in ("a", "b")
    }
    schema = {
        "oneOf": [{"$ref": f"#/$defs/{kind}"} for kind in kinds],
        "discriminator": {"propertyName": "k"},
        "$defs": kinds,
    }
    texts = ['{"k": "a", "a": ""}', '{"k": "b"}', "{}", '{"k": "b", "a": ""}']
    assert followed(compilable(schema), texts) == [True, True, False, False]


def test_objects_of_several_parts_have_no_members_that_none_describes() -> None:
    base = {"type": "object", "properties": {"a": TEXT}}
    schema = {
        "allOf": [{"$ref": "#/$defs/base"}, {"properties": {"b": TEXT}, "required": ["b"]}],
        "properties": {"c": {"type": "object", "properties": {"d": TEXT}}},
        "$defs": {"base": base},
    }
    texts = ['{"a": "", "b": "", "c": {}}', '{"b": "", "e": 1}', '{"b": "", "c": {"e": 1}}']
    assert followed(compilable(schema), texts) == [True, False, False]
    opened = {**schema, "$defs": {"base": {**base, "additionalProperties": True}}}
    assert followed(compilable(opened), texts[1:]) == [True, False]


def test_zods_pattern_of_email_addresses_is_enforced_beside_the_format() -> None:
    pattern = (
        r"^(?!\.)(?!.*\.\.)([A-Za-z0-9_'+\-\.]*)[A-Za-z0-9_+-]@([A-Za-z0-9][A-Za-z0-9\-]*\.)+"
        r"[A-Za-z]{2,}$"
    )
    schema = {"type": "string", "format": "email", "pattern": pattern}
    texts = ["a.b@c.org", "A+1@x-y.example", ".a@c.org", "a..b@c.org", "a#b@c.org", "a@c", "a@c.o1"]
    found = followed(compilable(schema), [json.dumps(text) for text in texts])
    assert found == [re.fullmatch(pattern, text) is not None for text in texts]
    assert found == [True] * 2 + [False] * 5


def test_pydantics_pattern_of_decimal_numbers_has_no_look_ahead() -> None:
    pattern = r"^(?!^[-+.]*$)[+-]?0*\d*\.?\d*$"
    texts = ["1", "-01.50", "+.5", "1.", "", ".", "-", "1e5"]
    found = followed(compilable({"pattern": pattern, **TEXT}), [json.dumps(each) for each in texts])
    assert found == [re.search(pattern, text) is not None for text in texts]


TIMES: list[Any] = [
    (
        "date",
        ["2023-02-28", "2024-02-29", "2000-02-29"],
        ["2023-02-29", "1900-02-29", "2023-04-31"],
    ),
    ("time", ["12:00:59Z", "12:00:00.5+01:00"], ["12:00:60Z", "12:00:00z", "24:00:00Z"]),
    ("date-time", ["2023-02-03T01:02:03Z"], ["2023-02-03t01:02:03Z", "2023-02-03T01:02:60Z"]),
]


@pytest.mark.parametrize(("form", "good", "bad"), TIMES)
def test_dates_and_times_are_those_that_readers_accept(form, good, bad) -> None:
    found = followed(
        compilable({**TEXT, "format": form}), [json.dumps(each) for each in good + bad]
    )
    assert found == [True] * len(good) + [False] * len(bad)


@pytest.mark.parametrize(
    ("schema", "keyword"),
    [
        ({"propertyNames": {"enum": ["a", 1]}}, "propertyNames"),
        ({"propertyNames": {"pattern": "a"}, "properties": {"a": {}}}, "propertyNames"),
        ({"propertyNames": False}, "propertyNames"),
        ({"anyOf": [{"properties": {"a": {}}}], "unevaluatedProperties": False}, "unevaluated"),
        ({"pattern": r"^(?!\.)(?!.*\.\.)a"}, "look-ahead"),
        ({"not": {"pattern": "a"}}, '"not" cannot be enforced here'),
        ({"not": {"type": "integer"}}, '"not"'),
        ({"if": {"properties": {"a": {"items": {}}}}, "then": False}, '"if", "then"'),
        ({"contains": {"const": 1}, "maxContains": 2}, '"contains", "maxContains"'),
    ],
)
def test_other_uses_of_these_keywords_are_refused(schema, keyword: str) -> None:
    assert keyword in (error_of({"type": ["object", "string", "array"], **schema}) or "")


def test_members_of_a_far_ancestor_are_not_excluded_silently() -> None:
    schema: Any = {"properties": {"a": {}}, "required": ["a"]}
    for at in range(5):
        schema = {"properties": {f"b{at}": {}}, "allOf": [{"allOf": [schema]}]}
    assert "unevaluated" in (error_of({**schema, "unevaluatedProperties": False}) or "")


def test_named_members_within_each_other_are_not_multiplied_without_end() -> None:
    schema: Any = {"type": "integer"}
    for _ in range(5):
        named = {"enum": [f"n{at}" for at in range(10)]}
        schema = {"type": "object", "propertyNames": named, "additionalProperties": schema}
    assert len(json.dumps(simplified(schema))) < 2 * MAX_REPEATED_CHARACTERS
    assert "propertyNames" in (error_of(schema) or "")


MEMBERS = {"properties": {f"a{at}": {} for at in range(2500)}}
TEXTS, NUMBERS = {"enum": [f"a{at}" for at in range(5000)]}, {"enum": [*range(2500)]}


def repeated(part: Any, definition: Any) -> dict[str, Any]:
    """A schema that uses a definition, `#/$defs/x`, in many equal parts."""
    return {"$defs": {"x": definition}, "anyOf": [part] * 20}


@pytest.mark.parametrize(
    "schema",
    [
        {"properties": {"x" * 30_000: {"anyOf": [{}] * 2000}}},
        {"$id": "http://a/" + "x" * 30_000, "anyOf": [{"$ref": "b#c"}] * 1000},
    ],
)
def test_the_work_on_references_is_limited(schema: Any) -> None:
    addresses = 0

    def count(frame: Any, event: str, argument: Any) -> None:
        nonlocal addresses
        addresses += event == "call" and frame.f_code is urljoin.__code__

    tracemalloc.start()
    sys.setprofile(count)
    try:
        assert simplified(schema) == schema
        assert tracemalloc.get_traced_memory()[1] < 32 << 20
    finally:
        sys.setprofile(None)
        tracemalloc.stop()
    assert addresses < 1000


def test_members_are_not_repeated_without_end() -> None:
    reference = {"$ref": "#/$defs/x"}
    for definition, part in (
        (MEMBERS, {**reference, "unevaluatedProperties": False}),
        (TEXTS, {"propertyNames": reference}),
    ):
        schema = repeated(part, definition)
        assert len(json.dumps(simplified(schema))) < 2 * MAX_REPEATED_CHARACTERS
    tracemalloc.start()
    try:
        simplified({**MEMBERS, "minProperties": 1})
        assert tracemalloc.get_traced_memory()[1] < 16 << 20
    finally:
        tracemalloc.stop()


@pytest.mark.parametrize("definition", [TEXTS, NUMBERS])
def test_the_work_on_listed_values_is_limited(definition: Any) -> None:
    work = 0

    def count(frame: Any, event: str, argument: Any) -> None:
        nonlocal work
        work += 1

    items = {"uniqueItems": True, "items": {"$ref": "#/$defs/x"}}
    schema = repeated({"not": {"$ref": "#/$defs/x"}, **items}, definition)
    sys.setprofile(count)  # of calls
    try:
        simplified(schema)
    finally:
        sys.setprofile(None)
    assert work < 2_000_000


def test_long_texts_are_not_excluded() -> None:
    assert error_of({"type": "string", "not": {"const": "a" * 80}}) is None
    assert '"not" cannot be enforced' in (error_of({"not": {"enum": ["a" * 1000]}}) or "")
