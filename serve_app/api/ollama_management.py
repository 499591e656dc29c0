"""The native protocol's management of models: pull, create, copy, delete, and files for create."""

import asyncio
import json
from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import aclosing
from dataclasses import replace
from pathlib import PurePosixPath
from typing import Any
from urllib.parse import urlsplit

from pydantic import Field
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, Response, StreamingResponse

from model_zoo.chat import Message
from model_zoo.definition import Definition
from model_zoo.modelfile import ROLES
from model_zoo.sources.pull import PullProgress
from runtime.errors import RequestError
from serve_app.addresses import is_loopback
from serve_app.api.fields import Body, harmless, read_object, unserved
from serve_app.definitions import blob_digest, of_fields, of_modelfile, remote_material
from serve_app.errors import ForbiddenError, refusal
from serve_app.on_demand.management import Management

NDJSON, JSON = "application/x-ndjson", "application/json"
# A single reply that is not there by then has status 200, whatever becomes of it.
PATIENCE_S = 10.0
BEAT_S = 1.0


class _NamedBody(Body):
    """A model, under either of the names that the field has had."""

    model: str = ""
    name: str = ""

    @property
    def named(self) -> str:
        if not (self.model or self.name):
            raise RequestError("model is required")
        return self.model or self.name


class PullBody(_NamedBody):
    stream: bool = True
    insecure: Any = unserved(False)
    username: Any = harmless()
    password: Any = harmless()


class DeleteBody(_NamedBody):
    pass


class CopyBody(Body):
    source: str = ""
    destination: str = ""


class ModelMessage(Body):
    role: str
    content: str = ""
    images: Any = unserved()
    tool_calls: Any = unserved()
    thinking: Any = unserved()


class CreateBody(_NamedBody):
    stream: bool = True
    base: str = Field(default="", alias="from")
    modelfile: str = ""
    files: dict[str, str] = Field(default_factory=dict)
    parameters: dict[str, Any] = Field(default_factory=dict)
    template: str = ""
    system: str = ""
    license: str | list[str] = ""
    messages: list[ModelMessage] = Field(default_factory=list)
    quantize: str = ""
    quantization: str = ""
    adapters: Any = unserved()
    path: Any = unserved()
    renderer: Any = unserved()
    parser: Any = unserved()
    requires: Any = unserved()
    info: Any = unserved()
    draft_files: Any = unserved()
    draft_quantize: Any = unserved()
    remote_host: Any = unserved()


class OllamaManagement:
    """Answers the endpoints; `management` None where this is not served.

    Where nobody needs a key, a web page from elsewhere that is open in a browser on this machine
    must not get through: browsers tell where a page is from.
    """

    def __init__(
        self, management: Management | None, *, max_body_bytes: int, has_keys: bool
    ) -> None:
        self._management = management
        self._max_body_bytes = max_body_bytes
        self._has_keys = has_keys

    async def pull(self, request: Request) -> Response:
        management = self._allowed(request)
        body = PullBody.read(await read_object(request, self._max_body_bytes))
        return await _told(management.pull(body.named), stream=body.stream)

    async def create(self, request: Request) -> Response:
        management = self._allowed(request)
        body = CreateBody.read(await read_object(request, self._max_body_bytes))
        name, definition = body.named, _definition(body)
        return await _told(management.create(name, definition), stream=body.stream)

    async def copy(self, request: Request) -> Response:
        management = self._allowed(request)
        body = CopyBody.read(await read_object(request, self._max_body_bytes))
        await management.copy(body.source, body.destination)
        return Response()

    async def delete(self, request: Request) -> Response:
        management = self._allowed(request)
        body = DeleteBody.read(await read_object(request, self._max_body_bytes))
        await management.delete(body.named)
        return Response()

    async def has_blob(self, request: Request) -> Response:
        held = await self._allowed(request).holds(request.path_params["digest"])
        return Response(status_code=200 if held else 404)

    async def bring_blob(self, request: Request) -> Response:
        management = self._allowed(request)
        stated = request.headers.get("content-length", "")
        size = int(stated) if stated.isdigit() else None
        try:
            new = await management.upload(request.path_params["digest"], size, request.stream())
        except ClientDisconnect:
            raise RequestError("the file did not come whole") from None
        return Response(status_code=201 if new else 200)

    async def push(self, request: Request) -> Response:
        raise ForbiddenError("models are not pushed from here")

    def _allowed(self, request: Request) -> Management:
        if self._management is None:
            raise ForbiddenError(
                "models are not managed through this server; `on_demand` with `api_keys` or with "
                "`manage_models: true` in its configuration would allow it"
            )
        origin = request.headers.get("origin")
        if origin is not None and not self._has_keys and _is_foreign(origin):
            raise ForbiddenError(f"pages from {origin[:80]} may not manage models here")
        return self._management


def _is_foreign(origin: str) -> bool:
    """Whether a page is from another machine, or does not say from where; apps have schemes of
    their own."""
    try:
        parts = urlsplit(origin)
        host = parts.hostname or ""
    except ValueError:
        return True
    if parts.scheme in ("http", "https"):
        return not is_loopback(host)
    return not parts.scheme


def _definition(body: CreateBody) -> Definition:
    if body.modelfile:
        said = {name for name in body.model_fields_set if getattr(body, name)}
        others = said - {"model", "name", "stream", "modelfile", "quantize", "quantization"}
        if others:
            raise RequestError(f"'modelfile' and '{sorted(others)[0]}' exclude each other")
        definition = of_modelfile(body.modelfile, remote_material)
        return replace(definition, quantize=body.quantize or body.quantization or None)
    licenses = [body.license] if isinstance(body.license, str) else body.license
    return of_fields(
        base=body.base or None,
        files={_flat(name): blob_digest(digest) for name, digest in body.files.items()},
        parameters=body.parameters,
        template=body.template,
        system=body.system,
        messages=[_message(index, each) for index, each in enumerate(body.messages)],
        licenses=licenses,
        quantize=body.quantize or body.quantization,
    )


def _message(index: int, message: ModelMessage) -> Message:
    role = message.role.lower()
    if role not in ROLES:
        raise RequestError(f'field "messages[{index}].role" is none of {", ".join(ROLES)}')
    return Message(role, message.content)


def _flat(name: str) -> str:
    """The file's own name: where it lay does not matter. RequestError for what is no such path."""
    path = PurePosixPath(name)
    if path.is_absolute() or ".." in path.parts or not path.name:
        raise RequestError("file path must be relative")
    if path.suffix.lower() in (".safetensors", ".json", ".bin", ".pth"):
        raise RequestError(
            f"file {name[:80]}: only GGUF is taken here; `caravan convert` makes it of a checkpoint"
        )
    return path.name


async def _told(steps: AsyncGenerator[PullProgress, None], *, stream: bool) -> Response:
    """Errors before the first step have their status."""
    if stream:
        first = await anext(steps)
        return StreamingResponse(_lines(first, steps), media_type=NDJSON)
    work = asyncio.create_task(_last(steps))
    if not (await asyncio.wait({work}, timeout=PATIENCE_S))[0]:
        return StreamingResponse(_whole(work), media_type=JSON)
    return JSONResponse(_shown(work.result()))


async def _lines(
    first: PullProgress, steps: AsyncGenerator[PullProgress, None]
) -> AsyncIterator[bytes]:
    async with aclosing(steps):
        try:
            yield _line(_shown(first))
            async for step in steps:
                yield _line(_shown(step))
        except Exception as error:
            yield _line({"error": refusal(error).message})


async def _whole(work: asyncio.Task[PullProgress]) -> AsyncIterator[bytes]:
    """Blanks, with which JSON may begin, until it is done: no proxy loses patience meanwhile."""
    try:
        while not (await asyncio.wait({work}, timeout=BEAT_S))[0]:
            yield b" "
        yield _line(_shown(work.result()))
    finally:
        work.cancel()


async def _last(steps: AsyncGenerator[PullProgress, None]) -> PullProgress:
    last = PullProgress("success")
    async with aclosing(steps):
        async for step in steps:
            last = step
    return last


def _shown(step: PullProgress) -> dict[str, Any]:
    shown: dict[str, Any] = {"status": step.status}
    if step.digest is not None:
        shown |= {"digest": step.digest, "total": step.total, "completed": step.completed}
    return shown


def _line(value: dict[str, Any]) -> bytes:
    return json.dumps(value, ensure_ascii=False, separators=(",", ":")).encode() + b"\n"
