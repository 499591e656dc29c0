"""The work that reading a value by a hostile tool schema takes, as the number of read items."""

from collections.abc import Iterator
from typing import Any, SupportsIndex

import pytest

from model_zoo.chat.formats.lark import Unwritable
from model_zoo.chat.formats.plain_schemas import plain
from model_zoo.chat.formats.reply_format import format_of
from model_zoo.chat.formats.schema_place import MAX_PARTS, PER_PART, Place, Reading
from model_zoo.chat.formats.text_patterns import strings_of
from tests.reply_parsing import parsed, replied

MANY = 20_001
MOST = MAX_PARTS * PER_PART


class Counted(list[Any]):
    """A list that counts the items that are read."""

    reads = 0

    def __getitem__(self, index: SupportsIndex | slice) -> Any:
        self.reads += 1
        return super().__getitem__(index)

    def __iter__(self) -> Iterator[Any]:
        for item in super().__iter__():
            self.reads += 1
            yield item


class Patterns(dict[str, Any]):
    """Members that count how often their names are listed."""

    reads = 0

    def __iter__(self) -> Iterator[str]:
        for name in super().__iter__():
            self.reads += 1
            yield name


def referring(part: Any) -> dict[str, Any]:
    """A schema that refers to `part` many times, for any member."""
    return {"additionalProperties": {"anyOf": [{"$ref": "#/part"}] * 95}, "part": part}


@pytest.mark.parametrize("option", [True, 0, {}], ids=["true", "a number", "a schema"])
@pytest.mark.parametrize("keyword", ["allOf", "anyOf", "oneOf"])
def test_options_are_not_listed_beyond_the_limit_of_parts(keyword: str, option: Any) -> None:
    options = Counted([option] * MANY)
    schema = referring({keyword: options})
    assert Place.whole(schema).member("x").reading() is Reading.TEXT
    combined = Place.whole({**schema["additionalProperties"], "part": schema["part"]})
    assert combined.member("x").types() is None and combined.names() == frozenset()
    assert options.reads <= 3 * MAX_PARTS


@pytest.mark.parametrize("keyword", ["enum", "type"])
def test_enumerations_are_not_read_beyond_the_limit_of_parts(keyword: str) -> None:
    values = Counted(["string"] * MANY)
    assert Place.whole(referring({keyword: values})).member("x").reading() is Reading.TEXT
    assert values.reads <= MOST
    assert Place.whole({"enum": [1] * 5000}).reading() is Reading.JSON


def test_patterns_are_not_listed_beyond_the_limit_of_parts() -> None:
    patterns = Patterns({f"^{at}": True for at in range(MANY)})
    schema = {"anyOf": [{"$ref": "#/part"}] * 95, "part": {"patternProperties": patterns}}
    assert Place.whole(schema).member("x").reading() is Reading.TEXT
    assert patterns.reads <= MOST


@pytest.mark.parametrize("keyword", ["enum", "allOf", "anyOf", "oneOf"])
def test_strings_are_not_listed_beyond_the_limit_of_parts(keyword: str) -> None:
    listed = Counted(["a"] * MANY if keyword == "enum" else [True] * MANY)
    schema = {"anyOf": [{"$ref": "#/part"}] * 95, "part": {keyword: listed}}
    with pytest.raises(Unwritable, match="too many schemas"):
        strings_of(Place.whole(schema))
    assert listed.reads <= MOST


def test_values_that_two_schemas_enumerate_are_compared_by_their_texts() -> None:
    one, other = ([f"{side}{at}" for at in range(MANY)] for side in "ab")
    assert plain(Place.whole({"allOf": [{"enum": one}, {"enum": other}]})) == []
    several = {"allOf": [{"enum": [1, 2.0, "1", True, {"a": 1}]}, {"enum": [{"a": 1}, 2, 1.0]}]}
    [both] = plain(Place.whole(several))
    assert both.schema["enum"] == [1, 2.0, {"a": 1}]


def test_enumerations_are_not_compared_beyond_the_limit() -> None:
    parts = [{"anyOf": [{"$ref": "#/part"}] * 10} for _ in range(2)]
    with pytest.raises(Unwritable, match="too many schemas"):
        plain(Place.whole({"allOf": parts, "part": {"enum": ["a"] * MANY}}))


def test_the_schema_of_a_parameter_is_read_once_in_a_reply() -> None:
    values = Counted([1, 2, 3])
    value = "<parameter=days>\n2\n</parameter>\n"
    call = f"<tool_call>\n<function=get_time>\n{value * 2}</function>\n</tool_call>\n"
    tools = {"get_time": {"properties": {"days": {"enum": values}}}}
    form = format_of("tools <tool_call> <function= <parameter=")
    events = replied(form, [call * 3], tools=tools)
    assert [arguments for _, arguments, _ in parsed(events).calls] == [{"days": 2}] * 3
    assert values.reads == len(values)
