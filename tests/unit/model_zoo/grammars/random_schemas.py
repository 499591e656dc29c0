"""Random JSON schemas for Hypothesis; some have keywords that llguidance refuses."""

import json
from typing import Any

from hypothesis import HealthCheck, settings
from hypothesis import strategies as st

# The same schemas each time; many may be refused.
REPEATED = settings(database=None, derandomize=True, suppress_health_check=list(HealthCheck))
NAMES = st.sampled_from(["a", "b", "c d", "é/~", '"q"'])
VALUES = st.one_of(
    st.none(), st.booleans(), st.integers(-99, 99), st.text("aé\"\\\n", max_size=4),
    st.lists(st.integers(0, 3), max_size=2),
)  # fmt: skip
ORDERED = st.tuples(st.integers(-30, 30), st.integers(0, 40))


@st.composite
def strings(draw) -> dict[str, Any]:
    schema: dict[str, Any] = {"type": "string"}
    kind = draw(st.integers(0, 4))
    if kind == 0:
        schema["maxLength"] = draw(st.integers(0, 8))
        schema["minLength"] = draw(st.integers(0, schema["maxLength"]))
    elif kind == 1:
        schema["pattern"] = draw(st.sampled_from(["^[a-c]{1,3}$", "^(x|yy)+$", "^\\d{2}-\\w$"]))
    elif kind == 2:
        schema["format"] = draw(st.sampled_from(["date", "uuid", "ipv4", "color"]))
    return schema


@st.composite
def numbers(draw) -> dict[str, Any]:
    schema: dict[str, Any] = {"type": draw(st.sampled_from(["integer", "number"]))}
    low, more = draw(ORDERED)
    if draw(st.booleans()):
        schema["minimum"] = low
    if draw(st.booleans()):
        schema[draw(st.sampled_from(["maximum", "exclusiveMaximum"]))] = low + more + 1
    if draw(st.integers(0, 4)) == 0:
        schema["multipleOf"] = draw(st.integers(1, 7))
    return schema


LEAVES = st.one_of(
    strings(),
    numbers(),
    st.just({"type": "null"}),
    st.just({"type": ["boolean", "null"]}),
    st.just({}),
    st.builds(lambda value: {"const": value}, VALUES),
    st.builds(lambda values: {"enum": values}, st.lists(VALUES, min_size=1, max_size=4)),
)


@st.composite
def arrays(draw, items) -> dict[str, Any]:
    schema: dict[str, Any] = {"type": "array", "items": draw(items)}
    least, most = draw(st.integers(0, 2)), draw(st.integers(2, 3))
    schema |= draw(st.sampled_from([{}, {"minItems": least}, {"maxItems": most}]))
    if draw(st.integers(0, 3)) == 0:
        schema["prefixItems"] = [draw(items)]
    return schema | draw(rarely({"contains": {"type": ["integer", "null"]}}))


@st.composite
def objects(draw, values) -> dict[str, Any]:
    properties = draw(st.dictionaries(NAMES, values, max_size=4))
    schema: dict[str, Any] = {"type": "object", "properties": properties}
    if properties:
        names = st.lists(st.sampled_from(sorted(properties)), unique=True)
        schema["required"] = draw(names)
    schema |= draw(st.sampled_from([{}, {"additionalProperties": False}]))
    return schema | draw(rarely({"propertyNames": {"pattern": "^a"}}))


@st.composite
def combined(draw, parts) -> dict[str, Any]:
    keyword = draw(st.sampled_from(["anyOf", "anyOf", "oneOf", "allOf"]))
    schema: dict[str, Any] = {keyword: draw(st.lists(parts, min_size=1, max_size=3))}
    return schema | draw(rarely(draw(st.sampled_from(CONDITIONS))))


# The last one is refused.
CONDITIONS: list[dict[str, Any]] = [
    {"not": {"type": "null"}},
    {"not": {"const": "a"}},
    {"if": {"required": ["a"]}, "then": {"properties": {"b": False}}},
    {"dependentRequired": {"a": ["b"]}},
    {"not": {"pattern": "a"}},
]


def rarely(keywords: dict[str, Any]) -> st.SearchStrategy[dict[str, Any]]:
    return st.sampled_from([{}] * 9 + [keywords])


NESTED = st.recursive(
    LEAVES, lambda inner: st.one_of(arrays(inner), objects(inner), combined(inner)), max_leaves=6
)


@st.composite
def schemas(draw) -> dict[str, Any]:
    """Half of them refer to a part that may contain itself."""
    if draw(st.booleans()):
        return draw(NESTED)
    item = {"type": "array", "items": {"$ref": "#/$defs/item"}, "maxItems": 2}
    definitions = {"item": {"anyOf": [draw(LEAVES), item]}}
    inner = objects(st.one_of(LEAVES, st.just({"$ref": "#/$defs/item"})))
    return {**draw(inner), "$defs": definitions}


def widened(schema: Any) -> Any:
    """The schema without what grammars need not enforce: that alternatives exclude each other."""
    return json.loads(json.dumps(schema).replace('"oneOf"', '"anyOf"'))
