"""Schemas that Pydantic writes compile, and replies that only the grammar determines are valid."""

import json
import re
from datetime import date, datetime, time, timedelta
from decimal import Decimal
from enum import IntEnum, StrEnum
from ipaddress import IPv4Address
from pathlib import Path
from typing import Annotated, Any, Literal, NamedTuple
from uuid import UUID

import pytest
from pydantic import (
    AnyUrl,
    BaseModel,
    ConfigDict,
    Field,
    Json,
    RootModel,
    SecretStr,
    StringConstraints,
    TypeAdapter,
)
from pydantic.dataclasses import dataclass
from pydantic.json_schema import GenerateJsonSchema
from typing_extensions import TypedDict

from model_zoo.grammars.json_schema import check_references, compilable
from tests.unit.model_zoo.grammars.random_model import RandomModel

REPLIES = 2


class Color(StrEnum):
    RED = "red"
    BLUE = "blue"


class Level(IntEnum):
    LOW = 1
    HIGH = 2


class Cat(BaseModel):
    kind: Literal["cat"] = "cat"
    lives: int = Field(ge=0, le=9)


class Dog(BaseModel):
    kind: Literal["dog", "puppy"] = "dog"
    color: Color | None = None


Pet = Annotated[Cat | Dog, Field(discriminator="kind")]


class Home(BaseModel):
    model_config = ConfigDict(extra="forbid")
    pets: list[Pet] = Field(min_length=1, max_length=2)
    best: Cat | Dog


class Sets(BaseModel):
    colors: set[Color]
    levels: frozenset[Level] = Field(max_length=2)
    flags: set[bool] = Field(min_length=1)
    numbers: set[int] = Field(max_length=3)


class Maps(BaseModel):
    models: dict[str, Cat] = Field(max_length=2)
    by_color: dict[Color, Dog]
    by_name: dict[Annotated[str, StringConstraints(pattern="^x-")], int] = Field(max_length=2)
    by_id: dict[UUID, Level] = Field(max_length=1)
    by_day: dict[date, bool] = Field(max_length=1)
    short: dict[Annotated[str, StringConstraints(max_length=4)], None] = Field(max_length=2)


class Node(BaseModel):
    """It contains itself."""

    value: Literal[1, "a", None, True]
    children: list["Node"] = Field(max_length=2)


class Point(NamedTuple):
    x: float
    y: Annotated[int, Field(multiple_of=5)]


class Movie(TypedDict, total=False):
    title: str
    years: tuple[int, ...]


@dataclass
class Shape:
    points: tuple[Point, Point]
    movie: Movie
    extra: Any = None


class Times(BaseModel):
    model_config = ConfigDict(use_attribute_docstrings=True)
    day: date
    at: datetime
    clock: time
    length: timedelta
    key: UUID
    address: IPv4Address


class Numbers(BaseModel):
    signed: int = Field(ge=-(2**63), le=2**63 - 1)
    unsigned: int = Field(ge=0, lt=2**64)
    share: float = Field(gt=0, lt=1)
    price: Decimal
    sum: float = Field(ge=0, le=1000, multiple_of=0.01)
    word: Annotated[str, StringConstraints(pattern=r"^[a-z]+$", min_length=2, max_length=5)]


class Open(BaseModel):
    model_config = ConfigDict(extra="allow")
    __pydantic_extra__: dict[str, int] = Field(init=False)
    name: str = Field(max_length=5, examples=["a"], deprecated=True)


class Others(BaseModel):
    """Values whose strings have formats that grammars do not know."""

    path: Path
    page: AnyUrl
    secret: SecretStr
    data: bytes
    json_text: Json[list[int]]
    pattern: re.Pattern[str]
    amount: Decimal = Field(ge=0, le=1000, multiple_of=Decimal("0.01"))


class OlderSchema(GenerateJsonSchema):
    """As versions before 2.13 write it: with a pattern for decimal numbers."""

    def get_decimal_pattern(self, schema: Any) -> str | None:
        return self.build_decimal_pattern(schema)


MODELS: list[Any] = [
    Home, Sets, Maps, Node, Shape, Times, Numbers, Open, Movie, Pet, RootModel[list[Node]],
    dict[str, list[Cat] | int | None], tuple[Color, Annotated[int, Field(strict=True)]],
]  # fmt: skip


@pytest.fixture(scope="module")
def model() -> RandomModel:
    return RandomModel()


def grammar_of(model: RandomModel, schema: dict[str, Any]) -> Any:
    check_references("format", schema)
    return model.grammars.compile(json.dumps({"grammars": [{"json_schema": compilable(schema)}]}))


@pytest.mark.parametrize("kind", MODELS, ids=str)
def test_replies_follow_the_model(model: RandomModel, kind: Any) -> None:
    adapter: TypeAdapter[Any] = TypeAdapter(kind)
    grammar = grammar_of(model, adapter.json_schema(schema_generator=OlderSchema))
    replies = [model.reply(grammar, seed) for seed in range(REPLIES)]
    finished = [reply for reply in replies if reply is not None]
    assert finished
    for reply in finished:
        adapter.validate_json(reply)


@pytest.mark.parametrize("mode", ["validation", "serialization"])
@pytest.mark.parametrize("kind", [*MODELS, Others], ids=str)
def test_all_schemas_compile(model: RandomModel, kind: Any, mode: Any) -> None:
    grammar_of(model, TypeAdapter(kind).json_schema(mode=mode, schema_generator=OlderSchema))
    at = "#/components/schemas/{model}"  # as in OpenAPI documents
    schema = TypeAdapter(kind).json_schema(mode=mode, ref_template=at)
    parts = schema.pop("$defs", {})
    grammar_of(model, {**schema, "components": {"schemas": parts}})
