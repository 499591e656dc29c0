"""Embeddings: /api/embed, the older /api/embeddings, and /v1/embeddings."""

import asyncio
import base64
import time
import uuid
from collections.abc import AsyncGenerator, Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
from numpy.typing import NDArray
from pydantic import Field
from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from runtime.errors import ModelFileError, RequestError
from serve_app.api.access import allowed_models
from serve_app.api.fields import Body, BodyReader, harmless, token_ids, unserved
from serve_app.api.openai import error_body
from serve_app.api.reply import WholeEncoder, WholeReply
from serve_app.api.tenant import tenant_id
from serve_app.config.keep_alive import keep_alive_s
from serve_app.gateway.backend import ChatBackend
from serve_app.gateway.model_registry import ServedModel
from serve_app.messages.tasks import ChatDelta, EmbeddingTask, RawText, TokenIds, merge_embeddings

MAX_INPUTS = 2048
# Inputs per request to a replica, and the number of concurrent requests.
GROUP, GROUPS_AT_ONCE = 32, 8

Vectors = NDArray[np.float32]
Input = RawText | TokenIds


class _NativeBody(Body):
    model: str = ""
    options: dict[str, Any] = Field(default_factory=dict)
    keep_alive: Any = None


class EmbedBody(_NativeBody):
    input: Any = None
    truncate: bool = True
    dimensions: int = Field(default=0, ge=0)


class OlderBody(_NativeBody):
    prompt: str = ""


class EmbeddingsBody(Body):
    model: str = ""
    input: Any = None
    dimensions: int | None = Field(default=None, ge=1)
    encoding_format: str = "float"
    user: Any = harmless()
    truncate_prompt_tokens: Any = unserved(-1)  # vLLM's; -1: at the model's limit


@dataclass(frozen=True, slots=True)
class Embeddings:
    """The three endpoints."""

    backend: ChatBackend
    bodies: BodyReader

    async def embed(self, request: Request) -> Response:
        body = await self.bodies.read(EmbedBody, request)
        model = await self.backend.model(body.model, allowed_models(request))
        inputs = await self.bodies.convert(request, _native_inputs, body.input)
        reply = partial(
            native_reply,
            model=body.model,
            dimensions=body.dimensions or None,
            begun_ns=time.monotonic_ns(),
        )
        keep_s = keep_alive_s(body.keep_alive)
        if not inputs:
            await self.backend.load(model, keep_s, tenant=tenant_id(request))
            return JSONResponse(reply(merge_embeddings([])))
        context = self.bodies.options(body.options).over(model.options).num_ctx
        tasks = _tasks(model, inputs, body.truncate, context, keep_s, tenant=tenant_id(request))
        return WholeReply(computed(self.backend, tasks), _native(reply))

    async def older(self, request: Request) -> Response:
        body = await self.bodies.read(OlderBody, request)
        model = await self.backend.model(body.model, allowed_models(request))
        keep_s = keep_alive_s(body.keep_alive)
        if not body.prompt:
            await self.backend.load(model, keep_s, tenant=tenant_id(request))
            return JSONResponse({"embedding": []})
        context = self.bodies.options(body.options).over(model.options).num_ctx
        text = RawText(body.prompt)
        tasks = _tasks(model, [text], True, context, keep_s, tenant=tenant_id(request))
        return WholeReply(computed(self.backend, tasks), _native(older_reply))

    async def openai(self, request: Request) -> Response:
        body = await self.bodies.read(EmbeddingsBody, request)
        model = await self.backend.model(body.model, allowed_models(request))
        encoding = body.encoding_format.lower()
        if encoding not in ("float", "base64"):
            raise RequestError(
                f"Invalid value for 'encoding_format' = {body.encoding_format}. "
                "Supported values: ['float', 'base64']."
            )
        inputs = await self.bodies.convert(request, _openai_inputs, body.input)
        context = model.options.num_ctx
        # Ollama truncates long inputs here. OpenAI refuses them, but its clients know only the
        # limits of OpenAI's models.
        tasks = _tasks(model, inputs, True, context, tenant=tenant_id(request))
        reply = partial(
            openai_reply,
            model=body.model,
            dimensions=body.dimensions,
            encoding=encoding,
        )
        encoder = WholeEncoder(reply, error_body)
        return WholeReply(computed(self.backend, tasks), encoder)


async def computed(
    backend: ChatBackend, tasks: Sequence[EmbeddingTask]
) -> AsyncGenerator[ChatDelta, None]:
    """One delta with all vectors. The first failure cancels the other tasks and becomes the
    response.
    """
    at_once = asyncio.Semaphore(GROUPS_AT_ONCE)

    async def answer(task: EmbeddingTask) -> ChatDelta:
        async with at_once:
            return merge_embeddings([delta async for delta in backend.generate(task)])

    answers = [asyncio.create_task(answer(task)) for task in tasks]
    try:
        yield merge_embeddings(await asyncio.gather(*answers))
    finally:
        for task in answers:
            task.cancel()
        await asyncio.gather(*answers, return_exceptions=True)


def native_reply(
    delta: ChatDelta, *, model: str, dimensions: int | None, begun_ns: int
) -> dict[str, Any]:
    """Vectors normalised to length 1; zero vectors stay zero. As in Ollama, more `dimensions` than
    the vectors have change nothing."""
    vectors = normalised(_array(delta.vectors), dimensions)
    reply: dict[str, Any] = {"model": model, "embeddings": vectors.tolist()}
    if delta.usage is not None and delta.vectors:
        reply["total_duration"] = time.monotonic_ns() - begun_ns
        reply["load_duration"] = delta.usage.queue_ns
        reply["prompt_eval_count"] = delta.usage.prompt_tokens
    return reply


def older_reply(delta: ChatDelta) -> dict[str, Any]:
    """One vector as the model returned it, not normalised."""
    return {"embedding": _array(delta.vectors)[0].tolist()}


def openai_reply(
    delta: ChatDelta, *, model: str, dimensions: int | None, encoding: str
) -> dict[str, Any]:
    found = _array(delta.vectors)
    if dimensions is not None and dimensions > found.shape[1]:
        raise RequestError(
            f"dimensions is {dimensions:,}; the model's vectors have {found.shape[1]:,}"
        )
    vectors = normalised(found, dimensions)
    data = [
        {"object": "embedding", "embedding": _shown(vector, encoding), "index": index}
        for index, vector in enumerate(vectors)
    ]
    count = 0 if delta.usage is None else delta.usage.prompt_tokens
    usage = {"prompt_tokens": count, "total_tokens": count}
    return {"object": "list", "data": data, "model": model, "usage": usage}


def _native(reply: Callable[[ChatDelta], dict[str, Any]]) -> WholeEncoder:
    return WholeEncoder(reply, lambda refusal: {"error": refusal.message})


def _shown(vector: Vectors, encoding: str) -> list[float] | str:
    if encoding == "base64":
        return base64.b64encode(vector.astype("<f4").tobytes()).decode()
    return vector.tolist()


def normalised(vectors: Vectors, dimensions: int | None) -> Vectors:
    """vectors [n, size], cut to `dimensions`, each divided by its length unless that is zero."""
    cut = vectors[:, :dimensions].astype(np.float64)
    lengths = np.linalg.norm(cut, axis=1, keepdims=True)
    return np.divide(cut, lengths, out=np.zeros_like(cut), where=lengths > 0).astype(np.float32)


def _array(vectors: Sequence[bytes]) -> Vectors:
    if not vectors:
        return np.zeros((0, 0), dtype=np.float32)
    array = np.stack([np.frombuffer(vector, dtype="<f4") for vector in vectors])
    if not np.isfinite(array).all():
        raise ModelFileError("The model returned a vector with non-finite numbers.")
    return array


def _tasks(
    model: ServedModel,
    inputs: Sequence[Input],
    truncate: bool,
    context_tokens: int | None,
    keep_s: float | None = None,
    *,
    tenant: str,
) -> list[EmbeddingTask]:
    groups = [tuple(inputs[begin : begin + GROUP]) for begin in range(0, len(inputs), GROUP)]
    return [
        EmbeddingTask(uuid.uuid4().hex, model.name, group, truncate, context_tokens, keep_s, tenant)
        for group in groups
    ]


def _native_inputs(given: Any) -> list[Input]:
    """A text or several texts. Errors begin with Ollama's message."""
    if given is None or given == "":
        return []
    if isinstance(given, str):
        return [RawText(given)]
    if not isinstance(given, list):
        raise _wrong("invalid input type", "input", "a string or a list of strings")
    return _texts("invalid input type", given)


def _openai_inputs(given: Any) -> list[Input]:
    """A text, several texts, token ids, or several lists of token ids. Errors begin with Ollama's
    message."""
    wrong = "invalid input"
    match given:
        case None:
            raise RequestError(f'{wrong}: field "input" is required')
        case str():
            return [RawText(given)]
        case [str(), *_]:
            return _texts(wrong, given)
        case [list(), *_]:
            _check_count(given)
            return [_tokens(wrong, f"input[{place}]", item) for place, item in enumerate(given)]
        case _ if ids := token_ids(given):
            return [TokenIds(ids)]
    raise _wrong(wrong, "input", "a string, or a list of strings, of token ids or of such lists")


def _texts(wrong: str, given: list[Any]) -> list[Input]:
    _check_count(given)
    for place, item in enumerate(given):
        if not isinstance(item, str):
            raise _wrong(wrong, f"input[{place}]", "a string")
    return [RawText(item) for item in given]


def _tokens(wrong: str, place: str, given: Any) -> TokenIds:
    ids = token_ids(given)
    if ids is None:
        raise _wrong(wrong, place, "a list of token ids")
    return TokenIds(ids)


def _wrong(wrong: str, place: str, wanted: str) -> RequestError:
    return RequestError(f'{wrong}: field "{place}" must be {wanted}')


def _check_count(inputs: list[Any]) -> None:
    if len(inputs) > MAX_INPUTS:
        raise RequestError(f"input has {len(inputs):,} texts; at most {MAX_INPUTS:,} are accepted")
