"""Ollama's protocol for managing models: pull, push, create, copy, delete, uploads for create."""

import asyncio
from collections.abc import AsyncGenerator, Awaitable, Callable, Mapping
from contextlib import aclosing
from dataclasses import dataclass, replace
from functools import partial
from pathlib import PurePosixPath
from typing import Any

from pydantic import Field
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response

from model_zoo.chat.messages import Message
from model_zoo.sources.pull import PullProgress
from model_zoo.store.definition import ChosenAdapter, Definition
from model_zoo.store.modelfile import ROLES
from runtime.errors import RequestError
from serve_app.api.fields import Body, BodyReader, Items, harmless, unserved
from serve_app.api.json_lines import json_line
from serve_app.api.refusals import ForbiddenError, Refusal
from serve_app.api.reply import LinesReply, SingleReply
from serve_app.api.tenant import tenant_of
from serve_app.gateway.model_management import ModelManagement
from serve_app.logs import get_logger
from serve_app.on_demand.definitions import (
    BaseResolver,
    blob_digest,
    definition_from_fields,
    definition_from_modelfile,
)

log = get_logger()


class _NamedBody(Body):
    """A model name, under either of the two field names."""

    model: str = ""
    name: str = ""

    @property
    def named(self) -> str:
        if not (self.model or self.name):
            raise RequestError("model is required")
        return self.model or self.name


class TransferBody(_NamedBody):
    """The body of a pull or a push."""

    stream: bool = True
    insecure: bool = False
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
    adapters: dict[str, str] = Field(default_factory=dict)
    path: Any = unserved()
    renderer: Any = unserved()
    parser: Any = unserved()
    requires: Any = unserved()
    info: Any = unserved()
    draft_files: Any = unserved()
    draft_quantize: Any = unserved()
    remote_host: Any = unserved()


@dataclass(frozen=True, slots=True)
class OllamaManagement:
    """The endpoints; `management` is None where the server does not manage models."""

    management: ModelManagement | None
    bodies: BodyReader

    async def pull(self, request: Request) -> Response:
        management = self._allowed()
        body = await self.bodies.read(TransferBody, request)
        steps = management.pull(body.named, insecure=body.insecure)
        return _report(steps, stream=body.stream)

    async def push(self, request: Request) -> Response:
        management = self._allowed()
        body = await self.bodies.read(TransferBody, request)
        steps = management.push(body.named, insecure=body.insecure)
        return _report(steps, stream=body.stream)

    async def create(self, request: Request) -> Response:
        management = self._allowed()
        body = await self.bodies.read(CreateBody, request)
        # Runs in a thread, because checking a template takes time.
        definition = await asyncio.to_thread(_definition, body, management.base_of)
        name = body.named
        images = sum(len(message.images) for message in body.messages)
        if images:  # `/save` in Ollama's command line sends the session's messages
            reason = "models keep the text of messages only"
            log.info("images not kept", model=name, images=images, reason=reason)
        return _report(management.create(name, definition), stream=body.stream)

    async def copy(self, request: Request) -> Response:
        management = self._allowed()
        body = await self.bodies.read(CopyBody, request)
        return _done(partial(management.copy, body.source, body.destination))

    async def delete(self, request: Request) -> Response:
        management = self._allowed()
        body = await self.bodies.read(DeleteBody, request)
        return _done(partial(management.delete, body.named))

    async def has_blob(self, request: Request) -> Response:
        held = await self._allowed().has_blob(request.path_params["digest"])
        return Response(status_code=200 if held else 404)

    async def upload_blob(self, request: Request) -> Response:
        management = self._allowed()
        stated = request.headers.get("content-length", "")
        size = int(stated) if stated.isdigit() else None
        digest, tenant = request.path_params["digest"], tenant_of(request)
        try:
            parts = self.bodies.parts(request)
            new = await management.upload(digest, size, parts, tenant=tenant)
        except ClientDisconnect:
            raise RequestError("the file is incomplete") from None
        return Response(status_code=201 if new else 200)

    def _allowed(self) -> ModelManagement:
        if self.management is None:
            raise ForbiddenError(
                "models are not managed through this server; `on_demand` with API keys or with "
                "`manage_models: true` in its configuration would allow it"
            )
        return self.management


def _definition(body: CreateBody, resolve_base: BaseResolver) -> Definition:
    if body.modelfile:
        given = {name for name in type(body).model_fields if getattr(body, name)}
        others = given - {"model", "name", "stream", "modelfile", "quantize", "quantization"}
        if others:
            raise RequestError(f"'modelfile' and '{sorted(others)[0]}' exclude each other")
        definition = definition_from_modelfile(body.modelfile, resolve_base)
        return replace(definition, quantize=body.quantize or body.quantization or None)
    licenses = [body.license] if isinstance(body.license, str) else body.license
    stated = Definition(
        files=_files(body.files),
        parameters=body.parameters,
        template=body.template,
        system=body.system,
        messages=tuple(_message(index, each) for index, each in enumerate(body.messages)),
        licenses=tuple(licenses),
        quantize=body.quantize or body.quantization,
        adapters=tuple(
            ChosenAdapter(blob_digest(digest)) for _, digest in sorted(body.adapters.items())
        ),
    )
    return definition_from_fields(stated, body.base, resolve_base)


def _message(index: int, message: ModelMessage) -> Message:
    role = message.role.lower()
    if role not in ROLES:
        raise RequestError(f'field "messages[{index}].role" must be one of {", ".join(ROLES)}')
    return Message(role, message.content)


def _files(stated: Mapping[str, str]) -> dict[str, str]:
    """Digests by base name. Raises RequestError for invalid paths, and for equal names."""
    files: dict[str, str] = {}
    for path, digest in stated.items():
        name = _file_name(path)
        if name in files:
            raise RequestError(f"two of the files have the name {name[:80]}; rename one")
        files[name] = blob_digest(digest)
    return files


def _file_name(name: str) -> str:
    """The file's base name. Raises RequestError for invalid paths."""
    path = PurePosixPath(name)
    if path.is_absolute() or ".." in path.parts or not path.name:
        raise RequestError("file path must be relative")
    if path.suffix.lower() in (".safetensors", ".json", ".bin", ".pth"):
        raise RequestError(
            f"file {name[:80]}: only GGUF is accepted; `caravan convert` converts checkpoints"
        )
    return path.name


def _done(work: Callable[[], Awaitable[None]]) -> Response:
    """An empty reply once `work` is done. It is cancelled when the client disconnects: a copy may
    import files, and a deletion may wait until the model is unloaded."""

    async def nothing() -> bytes:
        await work()
        return b""

    return SingleReply(nothing, _refused, media_type=None)


def _report(steps: AsyncGenerator[PullProgress, None], *, stream: bool) -> Response:
    """Streams the steps, or replies with the last."""
    if stream:
        return LinesReply(_lines(steps), _refused)
    # Pulls can fail late, for example on a full disk, and Ollama's clients ignore an error in a
    # single reply with status 200.
    return SingleReply(partial(_last, steps), _refused)


async def _lines(steps: AsyncGenerator[PullProgress, None]) -> AsyncGenerator[bytes, None]:
    async with aclosing(steps):
        async for step in steps:
            yield json_line(_shown(step))


async def _last(steps: AsyncGenerator[PullProgress, None]) -> bytes:
    last = PullProgress("success")
    async with aclosing(steps):
        async for step in steps:
            last = step
    return json_line(_shown(last))


def _refused(refusal: Refusal) -> bytes:
    return json_line({"error": refusal.message})


def _shown(step: PullProgress) -> dict[str, Any]:
    shown: dict[str, Any] = {"status": step.status}
    if step.digest is not None:
        shown |= {"digest": step.digest, "total": step.total, "completed": step.completed}
    return shown
