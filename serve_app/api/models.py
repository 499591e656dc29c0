"""/v1/models, which OpenAI's and Anthropic's protocols have in common."""

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any

from starlette.datastructures import QueryParams
from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from runtime.errors import RequestError
from serve_app.api.access import allowed_models
from serve_app.api.anthropic_reply import speaks_anthropic
from serve_app.api.fields import query_integer
from serve_app.config.options import Bounds
from serve_app.gateway.backend import ChatBackend
from serve_app.messages.listing import ListedModel
from serve_app.messages.model_card import ModelCard

LIST_LIMIT = Bounds(int, 1, 1000)
DEFAULT_LIST_LIMIT = 20


@dataclass(frozen=True, slots=True)
class Models:
    """Answers in Anthropic's form if the request has the header that its clients always send, else
    in OpenAI's."""

    backend: ChatBackend

    async def list(self, request: Request) -> Response:
        """OpenAI's list is whole; Anthropic's has pages."""
        models = await self.backend.registry.listed(allowed_models(request))
        if speaks_anthropic(request.scope):
            return JSONResponse(_page(models, request.query_params))
        listed: dict[str, Any] = {"object": "list", "data": [_openai(model) for model in models]}
        if "client_version" in request.query_params:
            # Codex reports an error unless it finds a list of its own, whose entries differ among
            # its versions. Models that are not in it get defaults.
            listed["models"] = []
        return JSONResponse(listed)

    async def one(self, request: Request) -> Response:
        """The model of the path; the list for `/v1/models/`."""
        if not request.path_params["model"]:
            return await self.list(request)
        model = await self.backend.model(request.path_params["model"], allowed_models(request))
        card = await self.backend.card(model)
        return JSONResponse((_anthropic if speaks_anthropic(request.scope) else _openai)(card))


def _openai(model: ListedModel | ModelCard) -> dict[str, Any]:
    namespace = model.name.rsplit("/", 1)[0] if "/" in model.name else "library"
    entry = {
        "id": model.name,
        "object": "model",
        "created": int(model.modified_at),
        "owned_by": namespace,
    }
    # vLLM's name, which clients read; it is not known of models that have not been loaded.
    return {**entry, "max_model_len": model.context_tokens} if model.context_tokens else entry


def _anthropic(model: ListedModel | ModelCard) -> dict[str, Any]:
    created = datetime.fromtimestamp(int(model.modified_at), UTC).isoformat()
    return {
        "type": "model",
        "id": model.name,
        "display_name": model.name,
        "created_at": created.replace("+00:00", "Z"),
        "lifecycle": "active",
        "max_input_tokens": model.context_tokens or None,
    }


def _page(models: Sequence[ListedModel], query: QueryParams) -> dict[str, Any]:
    """The models after `after_id` or before `before_id`, and whether there are more on that side of
    them."""
    after, before = query.get("after_id"), query.get("before_id")
    if after is not None and before is not None:
        raise RequestError('only one of the parameters "after_id" and "before_id" is accepted')
    limit = query_integer("limit", query.get("limit", str(DEFAULT_LIST_LIMIT)), LIST_LIMIT)
    if before is not None:
        found = models[: _index("before_id", before, models)]
        page = found[-limit:]
    else:
        found = models if after is None else models[_index("after_id", after, models) + 1 :]
        page = found[:limit]
    return {
        "data": [_anthropic(model) for model in page],
        "first_id": page[0].name if page else None,
        "last_id": page[-1].name if page else None,
        "has_more": len(found) > limit,
    }


def _index(parameter: str, id: str, models: Sequence[ListedModel]) -> int:
    for index, model in enumerate(models):
        if model.name == id:
            return index
    raise RequestError(f'parameter "{parameter}" is not the id of a model that is served')
