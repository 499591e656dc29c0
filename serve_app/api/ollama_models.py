"""Ollama's protocol for listing models: /api/tags, /api/show, /api/ps."""

import json
import re
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from typing import Any

from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from model_zoo.chat.messages import Message
from model_zoo.store.modelfile import render_modelfile
from runtime.errors import ModelNotFoundError
from serve_app.api.access import allowed_models
from serve_app.api.fields import Body, BodyReader, harmless
from serve_app.api.ollama import DEFAULT_TEMPLATE
from serve_app.config.model_sources import sound_name
from serve_app.config.options import LONGEST, Options
from serve_app.gateway.allowed_models import AllowedModels
from serve_app.gateway.backend import ChatBackend
from serve_app.gateway.model_registry import ServedModel
from serve_app.messages.listing import ListedModel, LoadedModel
from serve_app.messages.model_card import CardAdapter, ModelCard

# The expiry of a model that does not expire; clients require a date.
NEVER = "2318-01-01T00:00:00Z"


class ShowBody(Body):
    model: str = ""
    name: str = ""
    verbose: bool = False
    system: Any = harmless()
    template: Any = harmless()
    options: Any = harmless()


@dataclass(frozen=True, slots=True)
class OllamaModels:
    """Answers /api/tags, /api/show and /api/ps."""

    backend: ChatBackend
    bodies: BodyReader

    async def tags(self, request: Request) -> Response:
        models = await self.backend.registry.listed(allowed_models(request))
        return JSONResponse({"models": [_tag(model) for model in models]})

    async def ps(self, request: Request) -> Response:
        loaded = await self.backend.registry.loaded(allowed_models(request))
        return JSONResponse({"models": [_running(each) for each in loaded]})

    async def show(self, request: Request) -> Response:
        body = await self.bodies.read(ShowBody, request)
        model = await self._named(body.model or body.name, allowed_models(request))
        card = await self.backend.card(model, verbose=body.verbose)
        return JSONResponse(_shown(card, model.options.over(card.options)))

    async def _named(self, name: str, allowed: AllowedModels) -> ServedModel:
        """The model name. Raises RequestError for an invalid one."""
        try:
            return await self.backend.model(name, allowed)
        except ModelNotFoundError:
            sound_name(name)
            raise


def tagged(name: str) -> str:
    """The name with its tag, `latest` by default."""
    return name if ":" in name.rsplit("/", 1)[-1] else f"{name}:latest"


def parameter_size(count: int) -> str:
    """The number as text, such as "8.0B", "134.52M", "30K"."""
    if count >= 10**9:
        return f"{count / 10**9:.1f}B"
    if count >= 10**6:
        return f"{count / 10**6:.2f}M"
    return f"{count // 1000}K" if count >= 1000 else str(count)


def _tag(model: ListedModel) -> dict[str, Any]:
    return {
        "name": tagged(model.name),
        "model": tagged(model.name),
        "modified_at": _date(model.modified_at),
        "size": model.file_bytes,
        "digest": model.digest,
        "details": _details(model),
        "capabilities": list(model.capabilities),
    }


def _running(loaded: LoadedModel) -> dict[str, Any]:
    """An entry of /api/ps. `replicas`: number of processes that have the model loaded; sizes are
    summed over them."""
    model = loaded.model
    return {
        "name": tagged(model.name),
        "model": tagged(model.name),
        "size": loaded.reserved_bytes,
        "digest": model.digest,
        "details": _details(model),
        "expires_at": NEVER if loaded.expires_at is None else _date(loaded.expires_at),
        "size_vram": loaded.device_bytes,
        "context_length": model.context_tokens,
        "replicas": loaded.replicas,
    }


def _details(card: ModelCard | ListedModel) -> dict[str, Any]:
    return {
        "parent_model": "",
        "format": "gguf",
        "family": card.architecture,
        "families": [card.architecture],
        "parameter_size": parameter_size(card.parameter_count),
        "quantization_level": card.quantization,
        "context_length": card.context_length,
        "embedding_length": card.embedding_length,
    }


def _shown(card: ModelCard, options: Options) -> dict[str, Any]:
    parameters = _parameters(card, options)
    # Clients read the served context length here; `model_info` has the trained one.
    served = replace(options, num_ctx=min(options.num_ctx or LONGEST, card.context_tokens))
    messages = [Message(role, content) for role, content in card.messages]
    system = {} if card.system is None else {"system": card.system}
    turns = [{"role": role, "content": content} for role, content in card.messages]
    return {
        "license": card.license or "",
        "modelfile": render_modelfile(
            tagged(card.name),
            adapters=map(_adapter, card.adapters),
            template=card.chat_template,
            system=card.system,
            parameters=parameters,
            messages=messages,
            license=card.license,
        ),
        "parameters": "\n".join(
            f"{name:<30} {_spelled(value)}" for name, value in _parameters(card, served)
        ),
        "template": card.chat_template or DEFAULT_TEMPLATE,
        **system,
        **({"messages": turns} if turns else {}),
        "details": _details(card),
        "model_info": _model_info(card),
        **({} if card.projector is None else {"projector_info": dict(card.projector)}),
        "tensors": [
            {"name": name, "type": kind, "shape": list(shape)} for name, kind, shape in card.tensors
        ],
        "capabilities": list(card.capabilities),
        "modified_at": _date(card.modified_at),
    }


def _adapter(adapter: CardAdapter) -> str:
    """The adapter as /api/create accepts it, if it is a blob of the store."""
    return (
        f"@{adapter.name}" if re.fullmatch(r"sha256-[0-9a-f]{64}", adapter.name) else adapter.name
    )


def _parameters(card: ModelCard, options: Options) -> list[tuple[str, Any]]:
    """The parameters in Modelfile format: the model's own, overridden by `options`.

    A list yields one line per element.
    """
    stated, own = options.given(), card.options.given()
    changed = {name for name, value in stated.items() if own.get(name) != value}
    brought = {n: value for n, value in card.parameters.items() if n not in changed}
    return [
        (name, element)
        for name, value in {**stated, **brought}.items()
        for element in (value if isinstance(value, tuple | list) else (value,))
    ]


def _spelled(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False)


def _model_info(card: ModelCard) -> dict[str, Any]:
    left_out = ("general.name", "tokenizer.chat_template")
    info = {name: value for name, value in card.metadata.items() if name not in left_out}
    return info | {"general.parameter_count": card.parameter_count}


def _date(unix_s: float) -> str:
    return datetime.fromtimestamp(unix_s, UTC).isoformat(timespec="microseconds")
