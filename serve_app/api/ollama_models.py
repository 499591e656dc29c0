"""The native protocol's view of the served models: /api/tags, /api/show, /api/ps."""

from datetime import UTC, datetime
from typing import Any

from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from serve_app.api.fields import Body, harmless, read_object
from serve_app.backend import ChatBackend
from serve_app.card import ModelCard
from serve_app.options import Options

# A configured model stays; clients want a date all the same.
NEVER = "2318-01-01T00:00:00Z"


class ShowBody(Body):
    model: str = ""
    name: str = ""
    verbose: bool = False
    system: Any = harmless()
    template: Any = harmless()
    options: Any = harmless()


class OllamaModels:
    """Answers /api/tags, /api/show and /api/ps."""

    def __init__(self, backend: ChatBackend, *, max_body_bytes: int) -> None:
        self._backend = backend
        self._max_body_bytes = max_body_bytes

    async def tags(self, request: Request) -> Response:
        cards = sorted(await self._backend.cards(), key=lambda card: card.modified_at, reverse=True)
        return JSONResponse({"models": [_tag(card) for card in cards]})

    async def ps(self, request: Request) -> Response:
        return JSONResponse({"models": [_running(card) for card in await self._backend.cards()]})

    async def show(self, request: Request) -> Response:
        body = ShowBody.read(await read_object(request, self._max_body_bytes))
        model = self._backend.model(body.model or body.name)
        card = await self._backend.card(model, verbose=body.verbose)
        return JSONResponse(_shown(card, model.options.over(card.options)))


def tagged(name: str) -> str:
    """The name with its tag; `latest` where none was given."""
    return name if ":" in name.rsplit("/", 1)[-1] else f"{name}:latest"


def parameter_size(count: int) -> str:
    """Such as "8.0B", "134.52M", "30K"."""
    if count >= 10**9:
        return f"{count / 10**9:.1f}B"
    if count >= 10**6:
        return f"{count / 10**6:.2f}M"
    return f"{count // 1000}K" if count >= 1000 else str(count)


def _tag(card: ModelCard) -> dict[str, Any]:
    return {
        "name": tagged(card.name),
        "model": tagged(card.name),
        "modified_at": _date(card.modified_at),
        "size": card.file_bytes,
        "digest": card.digest,
        "details": _details(card),
        "capabilities": list(card.capabilities),
    }


def _running(card: ModelCard) -> dict[str, Any]:
    return {
        "name": tagged(card.name),
        "model": tagged(card.name),
        "size": card.reserved_bytes,
        "digest": card.digest,
        "details": _details(card),
        "expires_at": NEVER,
        "size_vram": card.device_bytes,
        "context_length": card.context_tokens,
    }


def _details(card: ModelCard) -> dict[str, Any]:
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
    parameters = _parameters(options)
    template = card.chat_template or ""
    system = {} if card.system is None else {"system": card.system}
    modelfile = [f"FROM {tagged(card.name)}", *(f"PARAMETER {line}" for line in parameters)]
    return {
        "license": card.license or "",
        "modelfile": "\n".join(modelfile),
        "parameters": "\n".join(f"{name:<30} {value}" for name, value in map(_halves, parameters)),
        "template": template,
        **system,
        "details": _details(card),
        "model_info": _model_info(card),
        **({} if card.projector is None else {"projector_info": dict(card.projector)}),
        "tensors": [
            {"name": name, "type": kind, "shape": list(shape)} for name, kind, shape in card.tensors
        ],
        "capabilities": list(card.capabilities),
        "modified_at": _date(card.modified_at),
    }


def _parameters(options: Options) -> list[str]:
    """The configured options as a Modelfile has them; a list gives a line per element."""
    lines = []
    for name, value in options.said().items():
        for element in value if isinstance(value, tuple) else (value,):
            lines.append(f'{name} "{element}"' if isinstance(element, str) else f"{name} {element}")
    return lines


def _halves(line: str) -> tuple[str, str]:
    name, _, value = line.partition(" ")
    return name, value


def _model_info(card: ModelCard) -> dict[str, Any]:
    left_out = ("general.name", "tokenizer.chat_template")
    info = {name: value for name, value in card.metadata.items() if name not in left_out}
    return info | {"general.parameter_count": card.parameter_count}


def _date(unix_s: float) -> str:
    return datetime.fromtimestamp(unix_s, UTC).isoformat(timespec="microseconds")
