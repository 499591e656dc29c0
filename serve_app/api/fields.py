"""Reading request bodies: typed fields, refusals by name, and errors meant for people."""

from typing import Any, Self

import msgspec
from pydantic import BaseModel, ConfigDict, Field, ValidationError
from pydantic.fields import FieldInfo
from starlette.requests import Request

from runtime.errors import RequestError
from serve_app.errors import BodyTooLargeError

_NEUTRAL = "neutral"


def harmless() -> Any:
    """A field that cannot change the answer: read and left alone."""
    return Field(default=None)


def unserved(*neutral: Any) -> Any:
    """A field that would change the answer and is not served yet.

    Only the values that mean "off" are accepted: those given, null, and the empty ones.
    """
    return Field(default=None, json_schema_extra={_NEUTRAL: list(neutral)})


class Body(BaseModel):
    """A JSON object of a request. Null means absent; unknown and unserved fields are refused."""

    model_config = ConfigDict(extra="forbid", strict=True, frozen=True, protected_namespaces=())

    @classmethod
    def read(cls, raw: dict[str, Any]) -> Self:
        try:
            body = cls.model_validate(_without_nulls(raw))
        except RecursionError:
            raise RequestError("the request body is nested too deeply") from None
        except ValidationError as error:
            raise RequestError(_message(dict(error.errors()[0]))) from None
        _refuse_unserved(body, "")
        return body


async def read_object(request: Request, max_bytes: int) -> dict[str, Any]:
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
    if isinstance(value, dict):
        return {name: _without_nulls(item) for name, item in value.items() if item is not None}
    return [_without_nulls(item) for item in value] if isinstance(value, list) else value


def _refuse_unserved(body: BaseModel, place: str) -> None:
    for name, info in type(body).model_fields.items():
        value = getattr(body, name)
        if _refused(value, info):
            raise RequestError(f'field "{place}{name}" is not served yet')
        for index, item in enumerate(value if isinstance(value, list | tuple) else ()):
            if isinstance(item, BaseModel):
                _refuse_unserved(item, f"{place}{name}[{index}].")


def _refused(value: Any, info: FieldInfo) -> bool:
    extra = info.json_schema_extra
    if not isinstance(extra, dict) or _NEUTRAL not in extra:
        return False
    return value not in (None, "", [], {}) and value not in extra[_NEUTRAL]  # type: ignore[operator]


def _message(details: dict[str, Any]) -> str:
    place = "".join(f"[{part}]" if isinstance(part, int) else f".{part}" for part in details["loc"])
    name = f'field "{place.removeprefix(".")}"'
    if details["type"] == "extra_forbidden":
        return f"{name} is not known"
    if details["type"] == "missing":
        return f"{name} is required"
    wanted = details["msg"].removeprefix("Value error, ").removeprefix("Input should be ")
    return f"{name} must be {wanted}"
