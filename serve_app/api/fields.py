"""Reading request bodies: typed fields, fields that are ignored or refused, errors by name."""

import re
from collections.abc import Mapping
from itertools import islice
from typing import Any, TypeVar

import msgspec
from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator
from pydantic.fields import FieldInfo
from starlette.requests import Request

from runtime.errors import RequestError
from serve_app.api.refusals import BodyTooLargeError
from serve_app.config.options import Options, read_options
from serve_app.logs import get_logger

# Clients choose the names of ignored fields: so many of them are logged, each cut to that length.
MOST_LOGGED = 64
LONGEST_NAME = 64
_NEUTRAL = "neutral"
_INDEX = re.compile(r"\[\d+\]")

log = get_logger()


def harmless() -> Any:
    """A field that cannot change the answer: read and left alone."""
    return Field(default=None)


def unserved(*neutral: Any) -> Any:
    """A field that would change the answer and is not served yet.

    Only the values that mean "off" are accepted: those given, null, and the empty ones.
    """
    return Field(default=None, json_schema_extra={_NEUTRAL: list(neutral)})


class Body(BaseModel):
    """A JSON object of a request. Null means absent; `BodyReader` handles unknown fields."""

    model_config = ConfigDict(extra="allow", strict=True, frozen=True, protected_namespaces=())

    @model_validator(mode="before")
    @classmethod
    def _drop_nulls(cls, raw: Any) -> Any:
        return _without_nulls(raw)


AnyBody = TypeVar("AnyBody", bound=Body)


class BodyReader:
    """Reads the request bodies of one ingress, of at most `max_bytes` each.

    Fields and options that no protocol defines are ignored, as Ollama and vLLM do, and logged once
    for each name. `strict`: they are refused.
    """

    def __init__(self, *, max_bytes: int, strict: bool = False) -> None:
        self._max_bytes = max_bytes
        self._strict = strict
        self._logged: set[str] = set()

    async def read(self, kind: type[AnyBody], request: Request) -> AnyBody:
        """RequestError names the field that is wrong, missing, or not served."""
        raw = await _read_object(request, self._max_bytes)
        try:
            body = kind.model_validate(raw)
        except ValidationError as error:
            raise RequestError(_message(dict(error.errors()[0]))) from None
        self._check(body, "")
        return body

    def options(self, raw: Mapping[str, Any]) -> Options:
        """Native options by name; RequestError as in `read_options`."""
        return read_options(raw, unknown=lambda name: self._unknown("option", "options.", name))

    def _check(self, body: BaseModel, place: str) -> None:
        """Unserved fields and unknown ones, here and in the objects within."""
        for name in islice(body.model_extra or (), MOST_LOGGED):
            self._unknown("field", place, name)
        for name, info in type(body).model_fields.items():
            value = getattr(body, name)
            if _refused(value, info):
                raise RequestError(f'field "{place}{name}" is not served yet')
            if isinstance(value, BaseModel):
                self._check(value, f"{place}{name}.")
            for index, item in enumerate(value if isinstance(value, list | tuple) else ()):
                if isinstance(item, BaseModel):
                    self._check(item, f"{place}{name}[{index}].")

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


async def _read_object(request: Request, max_bytes: int) -> dict[str, Any]:
    """The body as a JSON object, whatever its declared type."""
    data = await _read_bytes(request, max_bytes)
    if not data.strip():
        raise RequestError("missing request body")
    try:
        raw = msgspec.json.decode(data)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise RequestError(f"invalid JSON: {error}") from None
    if not isinstance(raw, dict):
        raise RequestError("invalid request body: a JSON object is wanted")
    return raw


async def _read_bytes(request: Request, max_bytes: int) -> bytes:
    declared = request.headers.get("content-length", "0")
    parts: list[bytes] = []
    size = int(declared) if declared.isdigit() else 0
    if size <= max_bytes:
        size = 0
        async for part in request.stream():
            size += len(part)
            parts.append(part)
            if size > max_bytes:
                break
    if size > max_bytes:
        raise BodyTooLargeError(f"the request body is larger than {max_bytes:,} bytes")
    return b"".join(parts)


def _without_nulls(value: Any) -> Any:
    if not isinstance(value, dict):
        return value
    return {name: item for name, item in value.items() if item is not None}


def _refused(value: Any, info: FieldInfo) -> bool:
    extra = info.json_schema_extra
    if not isinstance(extra, dict) or _NEUTRAL not in extra:
        return False
    value = _without_nulls(value)
    return value not in (None, "", [], {}) and value not in extra[_NEUTRAL]  # type: ignore[operator]


def _message(details: dict[str, Any]) -> str:
    place = "".join(f"[{part}]" if isinstance(part, int) else f".{part}" for part in details["loc"])
    name = f'field "{place.removeprefix(".")}"'
    if details["type"] == "missing":
        return f"{name} is required"
    wanted = details["msg"].removeprefix("Value error, ").removeprefix("Input should be ")
    return f"{name} must be {wanted}"
