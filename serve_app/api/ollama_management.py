"""The native protocol's management of models: pull, create, copy, delete, and files for create."""

import json
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable
from contextlib import aclosing
from dataclasses import replace
from functools import partial
from pathlib import PurePosixPath
from typing import Any

from pydantic import Field
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response, StreamingResponse

from model_zoo.chat.messages import Message
from model_zoo.sources.pull import PullProgress
from model_zoo.store.definition import Definition
from model_zoo.store.modelfile import ROLES
from runtime.errors import RequestError
from serve_app.api.fields import Body, BodyReader, Items, harmless, unserved
from serve_app.api.refusals import ForbiddenError, Refusal, refusal
from serve_app.api.reply import SingleReply
from serve_app.api.tenant import tenant_of
from serve_app.logs import get_logger
from serve_app.on_demand.definitions import Materials, blob_digest, of_fields, of_modelfile
from serve_app.on_demand.management import Management

NDJSON = "application/x-ndjson"

log = get_logger()


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
    images: list[str] = Field(default_factory=list)
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
    license: str | Items[str] = ""
    messages: Items[ModelMessage] = Field(default_factory=list)
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
    """Answers the endpoints; `management` None where this is not served."""

    def __init__(self, management: Management | None, bodies: BodyReader) -> None:
        self._management = management
        self._bodies = bodies

    async def pull(self, request: Request) -> Response:
        management = self._allowed()
        body = await self._bodies.read(PullBody, request)
        return await _told(management.pull(body.named), stream=body.stream)

    async def create(self, request: Request) -> Response:
        management = self._allowed()
        body = await self._bodies.read(CreateBody, request)
        name, definition = body.named, _definition(body, management.material)
        images = sum(len(message.images) for message in body.messages)
        if images:  # `/save` of Ollama's command line sends those of the session
            reason = "models keep the text of messages only"
            log.info("images not kept", model=name, images=images, reason=reason)
        return await _told(management.create(name, definition), stream=body.stream)

    async def copy(self, request: Request) -> Response:
        management = self._allowed()
        body = await self._bodies.read(CopyBody, request)
        return _done(partial(management.copy, body.source, body.destination))

    async def delete(self, request: Request) -> Response:
        management = self._allowed()
        body = await self._bodies.read(DeleteBody, request)
        return _done(partial(management.delete, body.named))

    async def has_blob(self, request: Request) -> Response:
        held = await self._allowed().holds(request.path_params["digest"])
        return Response(status_code=200 if held else 404)

    async def bring_blob(self, request: Request) -> Response:
        management = self._allowed()
        stated = request.headers.get("content-length", "")
        size = int(stated) if stated.isdigit() else None
        digest, tenant = request.path_params["digest"], tenant_of(request)
        try:
            new = await management.upload(digest, size, request.stream(), tenant=tenant)
        except ClientDisconnect:
            raise RequestError("the file did not come whole") from None
        return Response(status_code=201 if new else 200)

    async def push(self, request: Request) -> Response:
        raise ForbiddenError("models are not pushed from here")

    def _allowed(self) -> Management:
        if self._management is None:
            raise ForbiddenError(
                "models are not managed through this server; `on_demand` with API keys or with "
                "`manage_models: true` in its configuration would allow it"
            )
        return self._management


def _definition(body: CreateBody, materials: Materials) -> Definition:
    if body.modelfile:
        said = {name for name in type(body).model_fields if getattr(body, name)}
        others = said - {"model", "name", "stream", "modelfile", "quantize", "quantization"}
        if others:
            raise RequestError(f"'modelfile' and '{sorted(others)[0]}' exclude each other")
        definition = of_modelfile(body.modelfile, materials)
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
        materials=materials,
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


def _done(work: Callable[[], Awaitable[None]]) -> Response:
    """An empty reply once `work` is done. A copy may import files, a deletion may wait for the
    model to be unloaded; both end when the client leaves."""

    async def nothing() -> bytes:
        await work()
        return b""

    return SingleReply(nothing, _refused, media_type=None)


async def _told(steps: AsyncGenerator[PullProgress, None], *, stream: bool) -> Response:
    """Errors before the first step have their status."""
    if stream:
        first = await anext(steps)
        return StreamingResponse(_lines(first, steps), media_type=NDJSON)
    # Pulls fail late, e.g. for want of room, and Ollama's clients overlook the error in a single
    # reply whose status is 200.
    return SingleReply(partial(_last, steps), _refused)


async def _lines(
    first: PullProgress, steps: AsyncGenerator[PullProgress, None]
) -> AsyncIterator[bytes]:
    async with aclosing(steps):
        try:
            yield _line(_shown(first))
            async for step in steps:
                yield _line(_shown(step))
        except Exception as error:
            yield _refused(refusal(error))


async def _last(steps: AsyncGenerator[PullProgress, None]) -> bytes:
    last = PullProgress("success")
    async with aclosing(steps):
        async for step in steps:
            last = step
    return _line(_shown(last))


def _refused(refusal: Refusal) -> bytes:
    return _line({"error": refusal.message})


def _shown(step: PullProgress) -> dict[str, Any]:
    shown: dict[str, Any] = {"status": step.status}
    if step.digest is not None:
        shown |= {"digest": step.digest, "total": step.total, "completed": step.completed}
    return shown


def _line(value: dict[str, Any]) -> bytes:
    return json.dumps(value, ensure_ascii=False, separators=(",", ":")).encode() + b"\n"
