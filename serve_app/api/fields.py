"""Parses request bodies: typed fields, ignored or refused fields, errors that name the field."""

import re
from collections.abc import AsyncGenerator, Callable, Mapping
from dataclasses import dataclass
from functools import cache, partial
from itertools import islice
from typing import Annotated, Any, ClassVar, ParamSpec, TypeVar

import msgspec
from annotated_types import MaxLen
from pydantic import BaseModel, ConfigDict, FailFast, Field, ValidationError, model_validator
from pydantic.fields import FieldInfo
from pydantic_core import ErrorDetails
from starlette.requests import Request

from runtime.errors import RequestError
from serve_app.api.bodies import BodyLimits, BodyReceiver, in_time
from serve_app.api.json_values import decoded_json
from serve_app.api.large_bodies import LargeBodies
from serve_app.api.refusals import UnservedFieldError
from serve_app.api.tenant import tenant_of
from serve_app.config.options import Bounds, Options, clamped, number, read_options
from serve_app.config.wrong_values import REQUIRED_TYPES
from serve_app.logs import get_logger

# Clients choose the names of ignored fields: at most MOST_LOGGED are logged, cut to LONGEST_NAME.
MOST_LOGGED = 64
LONGEST_NAME = 64
# Maximum length of lists: messages of a request, parts of a message, and others.
MAX_ITEMS = 2048
# Of integers in addresses: more are out of every range, and long ones take long to read.
MAX_DIGITS = 9
# Parsing a body within both limits takes less than a millisecond. Larger ones are parsed in a
# thread.
INLINE_BYTES = 64 * 1024
INLINE_OBJECTS = 256
# The key of the neutral values in the JSON schema of a field that is not served.
NEUTRAL = "neutral"
_INDEX = re.compile(r"\[\d+\]")

log = get_logger()


class FirstError(FailFast):
    """Stops the validation of a list at its first invalid item, because an error takes more time
    than an item."""

    __hash__ = object.__hash__  # unions of annotated types need it, pydantic's class lacks it


Item = TypeVar("Item")
Items = Annotated[list[Item], FirstError(), MaxLen(MAX_ITEMS)]


@dataclass(frozen=True, slots=True)
class Objects:
    """Annotates a field whose value may be a list of objects that are parsed later.

    `known`: the names of their fields, each with those of the objects in it.
    """

    known: Mapping[str, Any]


def harmless(alias: str | None = None) -> Any:
    """A field that cannot change the response: parsed and ignored. `alias`: its name, if that is
    a keyword of Python."""
    ignored = "Ignored: it cannot change the response."
    return Field(default=None, alias=alias, description=ignored)


def unserved(*neutral: Any, empty_object_means_on: bool = False) -> Any:
    """A field that would change the response and is not supported yet.

    Accepts only values that mean "off": null, empty values, and `neutral`.
    """
    off: list[Any] = [None, "", []] if empty_object_means_on else [None, "", [], {}]
    return Field(default=None, json_schema_extra={NEUTRAL: [*off, *neutral]})


class Body(BaseModel):
    """A JSON object of a request. Null means absent. `BodyReader` handles unknown fields.

    `holds_images`: whether the object can contain images, whose size `image_bytes` returns.
    """

    holds_images: ClassVar[bool] = False
    model_config = ConfigDict(extra="allow", strict=True, frozen=True, protected_namespaces=())

    @model_validator(mode="before")
    @classmethod
    def _drop_nulls(cls, raw: Any) -> Any:
        return _without_nulls(raw)

    def image_bytes(self) -> int:
        """Size of the images in this object, encoded as in the JSON text."""
        return 0


AnyBody = TypeVar("AnyBody", bound=Body)
Given = ParamSpec("Given")
Converted = TypeVar("Converted")


class BodyReader:
    """Parses the request bodies of one ingress within `limits`.

    Fields and options that no protocol defines are ignored, as in Ollama and vLLM, and logged once
    per name. With `strict` they are refused.
    """

    def __init__(self, limits: BodyLimits, *, strict: bool = False) -> None:
        self._limits = limits
        self._receiver = BodyReceiver(limits)
        self._large = LargeBodies()
        self._strict = strict
        self._logged: set[str] = set()

    async def read(self, kind: type[AnyBody], request: Request) -> AnyBody:
        """The parsed body. Raises RequestError that names the field that is wrong, missing or
        unsupported.
        """
        async with self._receiver.received(request, images=kind.holds_images) as data:
            request.state.large_body = large = is_large(data)
            parse = partial(self._parsed, kind, data)
            return await self._large.begin(tenant_of(request), parse) if large else parse()

    def parts(self, request: Request) -> AsyncGenerator[bytes, None]:
        """The parts of a body that is no JSON, such as a file; SlowBodyError as for others."""
        return in_time(request, self._limits)

    async def convert(
        self,
        request: Request,
        function: Callable[Given, Converted],
        *args: Given.args,
        **kwargs: Given.kwargs,
    ) -> Converted:
        """The result of `function`, whose time grows with the body of `request`, which has been
        read. It is called in a thread if the body, or what `add` added to it, is large."""
        call = partial(function, *args, **kwargs)
        return await self._large.proceed(call) if request.state.large_body else call()

    def _parsed(self, kind: type[AnyBody], data: bytearray) -> AnyBody:
        raw = _decoded(data)
        try:
            body = kind.model_validate(raw)
        except ValidationError as error:
            raise RequestError(_message(error.errors(include_url=False), raw)) from None
        if len(data) > self._limits.max_text_bytes:
            self._limits.check_text(len(data) - body.image_bytes())
        self._check(body, "")
        return body

    def add(self, request: Request, *, large: bool) -> None:
        """Adds to the body of `request` what it refers to, such as a stored conversation."""
        request.state.large_body |= large

    def options(self, raw: Mapping[str, Any]) -> Options:
        """Native options by name. Raises RequestError as `read_options` does."""
        unknown = partial(self._unknown, "option", "options.")
        return read_options(clamped(raw), unknown=unknown)

    def leave_out(self, place: str) -> None:
        """Reports a part of a body that has no effect, as unknown fields are: it is logged once, or
        refused."""
        self._unknown("field", "", place)

    def _check(self, body: BaseModel, place: str) -> None:
        """Handles unsupported and unknown fields of an object and of the objects in it."""
        for name in islice(body.model_extra or (), MOST_LOGGED):
            self._unknown("field", place, name)
        given = body.model_fields_set
        for name, neutral, known in _fields(type(body)):
            if name not in given:
                continue
            value = getattr(body, name)
            if neutral is not None and _refused(value, neutral):
                raise UnservedFieldError(f"{place}{name}")
            if known is not None:
                self._check_objects(value, known, f"{place}{name}")
            elif isinstance(value, BaseModel):
                self._check(value, f"{place}{name}.")
            elif isinstance(value, list) and value and isinstance(value[0], BaseModel):
                for index, item in enumerate(value):
                    self._check(item, f"{place}{name}[{index}].")

    def _check_objects(self, value: Any, known: Mapping[str, Any], place: str) -> None:
        """Handles unknown fields of an object, or of those in a list, as `Objects` describes."""
        if isinstance(value, list):
            for index, item in enumerate(value):
                if isinstance(item, dict):
                    self._check_objects(item, known, f"{place}[{index}]")
        elif isinstance(value, dict):
            for name in islice((each for each in value if each not in known), MOST_LOGGED):
                self._unknown("field", f"{place}.", name)
            for name in (each for each in value if known.get(each)):
                self._check_objects(value[name], known[name], f"{place}.{name}")

    def _unknown(self, noun: str, place: str, name: str) -> None:
        name = name[:LONGEST_NAME]
        if self._strict:
            shown = f"{place}{name}" if noun == "field" else name
            raise RequestError(f'{noun} "{shown}" is not known, and `strict_fields` is set')
        if len(self._logged) < MOST_LOGGED:
            logged = _INDEX.sub("[]", place) + name
            if logged not in self._logged:
                self._logged.add(logged)
                log.info("unknown field ignored", field=logged)
                if len(self._logged) == MOST_LOGGED:
                    log.info("further unknown fields are not logged", logged=MOST_LOGGED)


def check_count(place: str, items: list[Any]) -> None:
    """Raises RequestError for a list at `place` that is too long and not checked with the body."""
    if len(items) > MAX_ITEMS:
        raise RequestError(f'field "{place}" has more than {MAX_ITEMS:,} items')


def is_large(*texts: bytes | bytearray) -> bool:
    """Whether work on these texts of JSON together takes so long that it belongs in a thread."""
    objects = sum(text.count(b"{") for text in texts)
    return sum(map(len, texts)) > INLINE_BYTES or objects > INLINE_OBJECTS


def parsed(kind: type[AnyBody], place: str, raw: Any) -> AnyBody:
    """An object within a body that is parsed later than the body itself; `place` is where it is.
    Raises RequestError that names the wrong or missing field."""
    try:
        return kind.model_validate(raw)
    except ValidationError as error:
        raise RequestError(_message(error.errors(include_url=False), raw, place)) from None


def query_integer(name: str, text: str, bounds: Bounds) -> int:
    """The value of a parameter of the address. Raises RequestError with its name if the text is no
    integer within `bounds`."""
    few_digits = text.isdecimal() and len(text) <= MAX_DIGITS
    return int(number(name, int(text) if few_digits else text, bounds, noun="parameter"))


TokenId = Annotated[int, msgspec.Meta(ge=0, lt=2**31)]


def token_ids(values: Any) -> tuple[int, ...] | None:
    """The values as token ids; None unless they are a non-empty list of integers in [0, 2**31)."""
    try:
        return msgspec.convert(values, tuple[TokenId, ...]) or None
    except msgspec.ValidationError:
        return None


def _decoded(data: bytearray) -> dict[str, Any]:
    """The body as a JSON object, whatever its Content-Type."""
    if not data or data.isspace():
        raise RequestError("missing request body")
    raw = decoded_json(data)
    if not isinstance(raw, dict):
        raise RequestError("invalid request body: it must be a JSON object")
    return raw


def _without_nulls(value: Any) -> Any:
    if not isinstance(value, dict):
        return value
    return {name: item for name, item in value.items() if item is not None}


@cache
def _fields(
    kind: type[BaseModel],
) -> tuple[tuple[str, list[Any] | None, Mapping[str, Any] | None], ...]:
    """Each field with its neutral values (None for a field that is served or harmless), and with
    the known fields of its `Objects` (None if it has none)."""
    return tuple(
        (name, neutral_values(info), _known_in_objects(info))
        for name, info in kind.model_fields.items()
    )


def _known_in_objects(info: FieldInfo) -> Mapping[str, Any] | None:
    return next((each.known for each in info.metadata if isinstance(each, Objects)), None)


def neutral_values(info: FieldInfo) -> list[Any] | None:
    """The values of an `unserved` field that are accepted; None for other fields."""
    extra = info.json_schema_extra
    return extra.get(NEUTRAL) if isinstance(extra, dict) else None  # type: ignore[return-value]


def _refused(value: Any, neutral: list[Any]) -> bool:
    return _without_nulls(value) not in neutral


def _message(errors: list[ErrorDetails], raw: Any, within: str = "") -> str:
    """Names the first wrong field of the object `raw`, which is at `within`, and what it must be. A
    value that fits none of several types has an error for each of them."""
    place = _place(errors[0], raw)
    same = [error for error in errors if _place(error, raw) == place]
    place = ".".join(filter(None, (within, place)))
    error = next((each for each in same if each["type"] not in REQUIRED_TYPES), same[0])
    match error["type"]:
        case "missing":
            return f'field "{place}" is required'
        case "too_long":
            return f'field "{place}" has more than {error["ctx"]["max_length"]:,} items'
        case "string_too_long":
            return f'field "{place}" has more than {error["ctx"]["max_length"]:,} characters'
        case "string_pattern_mismatch":
            return f'field "{place}" must match the pattern {error["ctx"]["pattern"]}'
        case "literal_error" if isinstance(error["input"], str):
            value, wanted = error["input"][:80], error["ctx"]["expected"]
            return f'field "{place}" is "{value}"; it must be {wanted}'
        case kind if kind in REQUIRED_TYPES:
            wanted = " or ".join(dict.fromkeys(REQUIRED_TYPES[each["type"]] for each in same))
            return f'field "{place}" must be {wanted}'
    wanted = error["msg"].removeprefix("Value error, ").removeprefix("Input should be ")
    return f'field "{place}" must be {wanted}'


def _place(error: ErrorDetails, raw: Any) -> str:
    """The path of a field. Pydantic's also has the names of types, which are not in the body."""
    place = ""
    for part in error["loc"]:
        if isinstance(part, int):
            place, raw = f"{place}[{part}]", raw[part]
        elif isinstance(raw, dict) and (part in raw or error["type"] == "missing"):
            place, raw = f"{place}.{part}", raw.get(part)
    return place.removeprefix(".")
