"""Parts of schemas, references, annotations, and the place of an error."""

import json
from typing import Any

import jsonschema
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from model_zoo.grammars.json_schema import (
    check_references,
    compilable,
    place_of_error,
    rebased,
)
from model_zoo.grammars.token_grammar import GrammarError, TokenGrammars, check
from runtime.errors import GenerationFailedError, RequestError
from tests.byte_tokenizer import ByteTokenizer
from tests.patience import HANG_S

TREE = {
    "$defs": {"node": {"type": "object", "properties": {"next": {"$ref": "#/$defs/node"}}}},
    "properties": {"root": {"$ref": "#/$defs/node"}, "all": {"items": {"$ref": "#"}}},
}


def error_of(schema) -> str | None:
    try:
        check(json.dumps({"grammars": [{"json_schema": compilable(schema)}]}))
    except GrammarError as error:
        return str(error)
    return None


@pytest.mark.parametrize(
    ("schema", "place"),
    [
        ({"not": {}}, ""),
        ({"properties": {"a": {"not": {"format": "date"}}}}, "/properties/a"),
        (
            {"properties": {"a/b~%": {"items": {"not": {"pattern": "x"}}}}},
            "/properties/a~1b~0%/items",
        ),
        (
            {"properties": {"b": {}, "a": {"anyOf": [{"type": "null"}, {"pattern": "(?=x)"}]}}},
            "/properties/a/anyOf/1",
        ),
        ({"items": {"$ref": "#/$defs/x"}, "$defs": {"x": {"not": {"const": []}}}}, "/items"),
        ({"type": "object", "properties": {"a": {"type": "text"}}}, "/properties/a"),
    ],
)
def test_an_error_is_located(schema, place) -> None:
    assert error_of(schema) is not None
    assert place_of_error(schema, error_of, limit_s=HANG_S) == place


def test_the_search_for_an_error_ends_with_its_time() -> None:
    schema = {"properties": {"a": {"not": {"pattern": "x"}}}}
    assert place_of_error(schema, error_of, limit_s=0) == ""


def within(pointer: str, schema) -> dict:
    """A schema with another one at `pointer`."""
    for step in reversed(pointer.split("/")[1:]):
        schema = [{"const": 0}, schema] if step == "1" else {step: schema}
    return schema


@pytest.mark.parametrize(
    ("pointer", "placed"),
    [("/properties/tool", lambda v: {"tool": v}), ("/items/anyOf/1", lambda v: [v])],
)
def test_references_of_a_moved_schema_stay_within_it(pointer, placed) -> None:
    schema = within(pointer, rebased(TREE, pointer))
    deep = {"root": {"next": {"next": {}}}, "all": [{"all": [{"root": {}}]}]}
    jsonschema.validate(deep, TREE)
    jsonschema.validate(placed(deep), schema)
    for wrong in ({"root": {"next": 5}}, {"all": [{"all": [{"root": 1}]}]}):
        with pytest.raises(jsonschema.ValidationError):
            jsonschema.validate(placed(wrong), schema)


@pytest.mark.parametrize("target", ["http://example.com/s", "other.json#/a", 5])
def test_references_to_other_documents_are_refused(target) -> None:
    schema = {"properties": {"a": {"anyOf": [{}, {"$ref": target}]}}}
    with pytest.raises(RequestError, match=r'field "format": "\$ref" at "/properties/a/anyOf/1"'):
        check_references("format", schema)


def chained(links: int) -> dict:
    """A schema whose definitions refer to the next one."""
    parts = {f"d{n}": {"properties": {"x": {"$ref": f"#/$defs/d{n + 1}"}}} for n in range(links)}
    return {"$ref": "#/$defs/d0", "$defs": {**parts, f"d{links}": {"type": "string"}}}


def test_schemas_that_refer_to_each_other_too_deeply_are_refused() -> None:
    check_references("format", chained(400))
    assert error_of(chained(400)) is None
    with pytest.raises(RequestError, match=r'"format" has parts .* 1,0\d\d levels deep'):
        check_references("format", chained(510))
    check_references("format", {"anyOf": [{"$ref": "#/$defs/d0"}] * 9, "$defs": {"d0": {}}})


@pytest.mark.parametrize("index", ["{}", "0{}"])
@pytest.mark.parametrize("keyword", ["prefixItems", "anyOf", "x-list"])
def test_references_to_items_of_lists_count_like_those_to_definitions(keyword, index) -> None:
    """Otherwise a chain of them overflows llguidance's stack, which ends the process."""
    links = [{"$ref": f"#/{keyword}/{index.format(n)}"} for n in range(100)]
    parts = [within("/items" * 20, link) for link in [*links[1:], {}]]
    with pytest.raises(RequestError, match="levels deep"):
        check_references("format", {"items": links[0], keyword: parts})


def test_references_to_boolean_schemas_are_accepted() -> None:
    schema = {"properties": {"a": {"$ref": "#/$defs/any"}}, "$defs": {"any": True}}
    check_references("format", schema)
    assert error_of(schema) is None


def test_names_and_values_that_look_like_references_are_not() -> None:
    schema = {"properties": {"$ref": {"const": {"$ref": "http://x"}}}, "enum": [{"$ref": "x"}]}
    check_references("format", schema)


KEYWORDS = st.sampled_from(
    "type properties required items additionalProperties anyOf allOf oneOf enum const $ref $defs "
    "definitions pattern format minLength maxItems minimum multipleOf prefixItems minProperties "
    "patternProperties uniqueItems $id $anchor x-guidance".split()
)
VALUES = st.sampled_from(
    [None, True, -1, 1.5, "", "#", "#/$defs/a", "(", "object", "date", [], {}, ["a"], [["a"]]]
)
NONSENSE = st.dictionaries(
    KEYWORDS,
    st.recursive(
        VALUES,
        lambda inner: st.one_of(
            st.lists(inner, max_size=2), st.dictionaries(KEYWORDS, inner, max_size=3)
        ),
        max_leaves=8,
    ),
    max_size=4,
)


@given(NONSENSE)
@settings(max_examples=150, database=None, derandomize=True)
def test_nonsense_is_refused_and_does_not_crash(schema) -> None:
    if error_of(schema) is not None:
        place_of_error(schema, error_of)


OBJECT = {"type": "object", "properties": {"a": {"const": 1}}}


@pytest.mark.parametrize(
    ("schema", "text", "accepted"),
    [
        (OBJECT, '{"a":1}', True),
        (OBJECT, '{"a":1,"b":2}', False),
        ({**OBJECT, "additionalProperties": True}, '{"a":1,"b":2}', True),
        ({**OBJECT, "additionalProperties": {"const": 3}}, '{"a":1,"b":3}', True),
        ({**OBJECT, "required": ["b"]}, '{"a":1,"b":2}', True),
        ({"type": "object"}, '{"b":2}', True),
        ({"allOf": [OBJECT]}, '{"a":1,"b":2}', False),
        ({"allOf": [OBJECT, {"properties": {"b": {}}}]}, '{"a":1,"b":2}', True),
        ({**OBJECT, "anyOf": [{"required": ["b"]}]}, '{"a":1,"b":2}', True),
        ({"anyOf": [OBJECT, {"type": "null"}]}, '{"a":1,"b":2}', False),
        ({"items": OBJECT}, '[{"a":1,"b":2}]', False),
    ],
)
def test_objects_have_further_properties_only_where_the_schema_says_so(schema, text, accepted):
    jsonschema.validate(json.loads(text), schema)
    tokenizer = ByteTokenizer()
    source = json.dumps({"grammars": [{"json_schema": compilable(schema)}]})
    matcher = TokenGrammars(tokenizer).compile(source).matcher()  # type: ignore[arg-type]
    for token in tokenizer.encode(text):
        matcher.accept(token)
    mask = bytearray(4 * -(-tokenizer.vocab_size // 32))
    if not accepted:
        with pytest.raises(GenerationFailedError):
            matcher.allowed(memoryview(mask))
        return
    matcher.allowed(memoryview(mask))
    (end,) = tokenizer.end_tokens
    assert mask[end // 8] >> end % 8 & 1


EVEN, UNTIL_47 = {"multipleOf": 2}, {"maximum": 47}


@pytest.mark.parametrize(
    "schema",
    [
        {"type": "number", **EVEN, **UNTIL_47},
        {"type": ["number", "null"], "multipleOf": 2.0, "minimum": 1, "exclusiveMaximum": 47},
        {**EVEN, **UNTIL_47},
        {"type": "number", **UNTIL_47, "allOf": [EVEN]},
        {"allOf": [{"type": "number", **EVEN}, {"multipleOf": 0.5, **UNTIL_47}]},
        {"type": "number", "anyOf": [{**EVEN, **UNTIL_47}, {"type": "null"}]},
        {"$defs": {"a": {"type": ["number", "string"], **UNTIL_47}}, "$ref": "#/$defs/a", **EVEN},
    ],
)
def test_a_control_token_may_follow_a_bounded_multiple(schema) -> None:
    tokenizer = ByteTokenizer("<tool>")
    tool = tokenizer.vocabulary.control["<tool>"]
    lark = {"lark_grammar": f"start: @value <[{tool}]>"}
    source = json.dumps({"grammars": [lark, {"name": "value", "json_schema": compilable(schema)}]})
    grammar = TokenGrammars(tokenizer).compile(source)  # type: ignore[arg-type]
    for value in (36, 3):
        follows = jsonschema.Draft202012Validator(schema).is_valid(value)
        matcher, mask = grammar.matcher(), bytearray(4 * grammar.words)
        for token in tokenizer.encode(str(value)):
            matcher.accept(token)
        matcher.allowed(memoryview(mask))
        assert bool(mask[tool // 8] >> tool % 8 & 1) == follows == (value == 36)


def test_annotations_do_not_prevent_compilation_and_options_are_ours() -> None:
    schema = {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        "$id": "https://example.com/s",
        "x-guidance": {"lenient": True},
        "properties": {"a": {"type": "string", "format": "color", "uniqueItems": False}},
    }
    assert error_of(schema) is None
    assert error_of({**schema, "not": {}}) is not None


NAMES: dict[str, Any] = {f"n{at}": {} for at in range(10)}
# Schemas around another one, which is copied for each name, position or alternative.
COPYING: dict[str, Any] = {
    "names": lambda part: {
        "additionalProperties": part,
        "allOf": [{"properties": NAMES, "additionalProperties": False}],
    },
    "patterns": lambda part: {"patternProperties": {"": part}, "properties": NAMES},
    "positions": lambda part: {"items": part, "allOf": [{"prefixItems": [{}] * 10}]},
    "alternatives": lambda part: {
        "additionalProperties": part,
        "anyOf": [{"minProperties": least} for least in range(10)],
    },
}


@pytest.mark.parametrize("case", COPYING)
def test_merged_parts_are_not_multiplied_without_end(case: str) -> None:
    """Most of these would take all memory while they are compiled."""
    schema: Any = {"type": "integer"}
    for _ in range(8):
        schema = COPYING[case](schema)
    with pytest.raises(RequestError, match="it has more than 200,000 parts"):
        check_references("format", schema)


def test_parts_are_merged_through_references() -> None:
    both = {"properties": {"a": {"type": "object"}, "b": {"type": "object"}}}
    defs: Any = {"d0": {"type": "integer"}}
    for level in range(1, 20):
        before = {"$ref": f"#/$defs/d{level - 1}"}
        defs[f"d{level}"] = {"additionalProperties": before, "allOf": [both]}
    with pytest.raises(RequestError, match="it has more than 200,000 parts"):
        check_references("format", {"$defs": defs, "$ref": "#/$defs/d19"})


def test_alternatives_alone_are_not_merged() -> None:
    schema: Any = {"type": "integer"}
    for _ in range(8):
        schema = {"anyOf": [{"type": "array", "items": schema}, {"type": "null"}], "title": "T"}
        schema = {"properties": {f"n{at}": schema if at == 0 else {} for at in range(10)}}
    check_references("format", schema)


def test_references_alone_are_not_merged() -> None:
    defs = {
        f"d{level}": {"properties": {f"m{at}": {"$ref": f"#/$defs/d{at}"} for at in range(60)}}
        for level in range(60)
    }
    check_references("format", {"$defs": defs, "$ref": "#/$defs/d0"})


def test_the_search_for_merged_objects_is_bounded() -> None:
    big = {"allOf": [{"properties": {f"m{at}": {}}} for at in range(3000)]}
    items = [{"allOf": [{"$ref": "#/$defs/big"}]} for _ in range(3000)]
    with pytest.raises(RequestError, match="when they are merged"):
        check_references("format", {"$defs": {"big": big}, "prefixItems": items})
