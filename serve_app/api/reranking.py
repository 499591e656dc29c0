"""Ranking texts by a query: /v1/rerank as in Cohere, Jina and vLLM, /v1/score as in vLLM."""

import math
import time
import uuid
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
from pydantic import Field
from starlette.requests import Request
from starlette.responses import Response

from runtime.errors import ModelFileError, RequestError
from serve_app.api.access import allowed_models
from serve_app.api.embeddings import GROUP, computed
from serve_app.api.fields import Body, BodyReader, harmless, unserved
from serve_app.api.openai import error_body
from serve_app.api.reply import WholeEncoder, WholeReply
from serve_app.api.tenant import tenant_id
from serve_app.gateway.backend import ChatBackend
from serve_app.gateway.model_registry import ServedModel
from serve_app.messages.tasks import ChatDelta, EmbeddingTask, RawText

MAX_DOCUMENTS = 1000  # as in Cohere's API


class _RankingBody(Body):
    model: str = ""
    user: Any = harmless()
    truncate_prompt_tokens: Any = unserved(-1)  # vLLM's; -1: at the model's limit


class RerankBody(_RankingBody):
    query: str
    documents: list[Any]
    top_n: int | None = Field(default=None, ge=1)
    return_documents: bool = False
    max_chunks_per_doc: Any = unserved()
    max_tokens_per_doc: Any = unserved()
    rank_fields: Any = unserved(["text"])


class ScoreBody(_RankingBody):
    text_1: Any
    text_2: Any


@dataclass(frozen=True, slots=True)
class Reranking:
    """The two endpoints. Documents longer than the context are cut at their end."""

    backend: ChatBackend
    bodies: BodyReader

    async def rerank(self, request: Request) -> Response:
        body = await self.bodies.read(RerankBody, request)
        texts = _documents(body.documents)
        reply = partial(rerank_reply, body=body, texts=texts)
        return await self._reply(request, body.model, [body.query], texts, reply)

    async def score(self, request: Request) -> Response:
        body = await self.bodies.read(ScoreBody, request)
        queries, texts = _texts("text_1", body.text_1), _texts("text_2", body.text_2)
        if len(queries) not in (1, len(texts)):
            raise RequestError(
                f'field "text_1" has {len(queries):,} texts and "text_2" {len(texts):,}; they must '
                'be as many, or "text_1" one'
            )
        reply = partial(score_reply, model=body.model)
        return await self._reply(request, body.model, queries, texts, reply)

    async def _reply(
        self,
        request: Request,
        name: str,
        queries: Sequence[str],
        texts: Sequence[str],
        reply: Callable[[ChatDelta], dict[str, Any]],
    ) -> Response:
        model = await self.backend.model(name, allowed_models(request))
        tasks = _tasks(model, queries, texts, tenant=tenant_id(request))
        encoder = WholeEncoder(reply, error_body)
        return WholeReply(computed(self.backend, tasks), encoder)


def rerank_reply(delta: ChatDelta, *, body: RerankBody, texts: Sequence[str]) -> dict[str, Any]:
    """The most relevant texts first."""
    logits = _logits(delta)
    order = sorted(range(len(texts)), key=lambda index: -logits[index])[: body.top_n]
    results = []
    for index in order:
        result: dict[str, Any] = {"index": index}
        if body.return_documents:
            result["document"] = {"text": texts[index]}
        results.append(result | {"relevance_score": _probability(logits[index])})
    usage = _usage(delta)
    return {"id": _id("rerank"), "model": body.model, "usage": usage, "results": results}


def score_reply(delta: ChatDelta, *, model: str) -> dict[str, Any]:
    data = [
        {"index": index, "object": "score", "score": _probability(logit)}
        for index, logit in enumerate(_logits(delta))
    ]
    return {
        "id": _id("score"),
        "object": "list",
        "created": int(time.time()),
        "model": model,
        "data": data,
        "usage": _usage(delta),
    }


def _logits(delta: ChatDelta) -> list[float]:
    scores = np.frombuffer(b"".join(delta.vectors), dtype="<f4").astype(np.float64)
    if not np.isfinite(scores).all():
        raise ModelFileError("The model returned a score that is not finite.")
    return scores.tolist()


def _probability(logit: float) -> float:
    """The sigmoid, as in vLLM and sentence-transformers."""
    power = math.exp(-abs(logit))
    return (1 if logit >= 0 else power) / (1 + power)


def _usage(delta: ChatDelta) -> dict[str, int]:
    count = 0 if delta.usage is None else delta.usage.prompt_tokens
    return {"prompt_tokens": count, "total_tokens": count}


def _id(kind: str) -> str:
    return f"{kind}-{uuid.uuid4().hex}"


def _tasks(
    model: ServedModel, queries: Sequence[str], texts: Sequence[str], *, tenant: str
) -> list[EmbeddingTask]:
    context = model.options.num_ctx
    tasks = []
    for begin in range(0, len(texts), GROUP):
        group = slice(begin, begin + GROUP)
        own = queries if len(queries) == 1 else queries[group]
        task = EmbeddingTask(
            uuid.uuid4().hex,
            model.name,
            tuple(map(RawText, texts[group])),
            context_tokens=context,
            tenant=tenant,
            queries=tuple(map(RawText, own)),
        )
        tasks.append(task)
    return tasks


def _documents(given: Sequence[Any]) -> list[str]:
    texts = [item.get("text") if isinstance(item, dict) else item for item in given]
    return _texts("documents", texts)


def _texts(field: str, given: Any) -> list[str]:
    """A text or several; at least one."""
    texts = [given] if isinstance(given, str) else given
    if not isinstance(texts, list) or not texts:
        raise RequestError(f'field "{field}" must be a text or a list with at least one')
    if len(texts) > MAX_DOCUMENTS:
        raise RequestError(
            f'field "{field}" has {len(texts):,} texts; at most {MAX_DOCUMENTS:,} are accepted'
        )
    for index, text in enumerate(texts):
        if not isinstance(text, str):
            raise RequestError(f'field "{field}[{index}]" must be a text')
    return texts
