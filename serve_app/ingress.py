"""The HTTP surface as one ASGI application: routes, keys, error bodies."""

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.requests import Request
from starlette.responses import JSONResponse, PlainTextResponse, Response
from starlette.routing import Route

from runtime.errors import CaravanError
from serve_app.api.embeddings import Embeddings
from serve_app.api.errors import on_error, on_http_error
from serve_app.api.ollama import OllamaChat
from serve_app.api.ollama_management import OllamaManagement
from serve_app.api.ollama_models import OllamaModels
from serve_app.api.openai import OpenAIModels
from serve_app.api.openai_chat import OpenAIChat
from serve_app.api.openai_completions import OpenAICompletions
from serve_app.auth import RequireKey
from serve_app.backend import ChatBackend
from serve_app.images import ImageReader, ImageRules
from serve_app.on_demand.management import Management

VERSION = "0.1.0"


def ingress_app(
    backend: ChatBackend,
    management: Management | None = None,
    *,
    api_keys: tuple[str, ...] | None,
    max_body_bytes: int,
    image_rules: ImageRules,
) -> Starlette:
    images = ImageReader(backend, image_rules)
    keys = [] if api_keys is None else [Middleware(RequireKey, keys=api_keys)]
    handlers = {CaravanError: on_error, HTTPException: on_http_error, Exception: on_error}
    return Starlette(
        routes=[
            *_plain_routes(),
            *_ollama_routes(backend, images, max_body_bytes),
            *_management_routes(management, max_body_bytes, keys=api_keys is not None),
            *_openai_routes(backend, images, max_body_bytes),
        ],
        middleware=keys,
        exception_handlers=handlers,
    )


def _plain_routes() -> list[Route]:
    return [
        Route("/", _running),
        Route("/healthz", _healthy),
        Route("/api/version", _version),
    ]


def _ollama_routes(backend: ChatBackend, images: ImageReader, max_body_bytes: int) -> list[Route]:
    chat = OllamaChat(backend, images, max_body_bytes=max_body_bytes)
    models = OllamaModels(backend, max_body_bytes=max_body_bytes)
    embeddings = Embeddings(backend, max_body_bytes=max_body_bytes)
    return [
        Route("/api/chat", chat.chat, methods=["POST"]),
        Route("/api/generate", chat.generate, methods=["POST"]),
        Route("/api/embed", embeddings.embed, methods=["POST"]),
        Route("/api/embeddings", embeddings.older, methods=["POST"]),
        Route("/api/tags", models.tags),
        Route("/api/ps", models.ps),
        Route("/api/show", models.show, methods=["POST"]),
    ]


def _management_routes(
    management: Management | None, max_body_bytes: int, *, keys: bool
) -> list[Route]:
    models = OllamaManagement(management, max_body_bytes=max_body_bytes, has_keys=keys)
    return [
        Route("/api/pull", models.pull, methods=["POST"]),
        Route("/api/create", models.create, methods=["POST"]),
        Route("/api/copy", models.copy, methods=["POST"]),
        Route("/api/delete", models.delete, methods=["DELETE"]),
        Route("/api/blobs/{digest}", models.has_blob, methods=["HEAD"]),
        Route("/api/blobs/{digest}", models.bring_blob, methods=["POST"]),
        Route("/api/push", models.push, methods=["POST"]),
    ]


def _openai_routes(backend: ChatBackend, images: ImageReader, max_body_bytes: int) -> list[Route]:
    chat = OpenAIChat(backend, images, max_body_bytes=max_body_bytes)
    completions = OpenAICompletions(backend, max_body_bytes=max_body_bytes)
    models = OpenAIModels(backend)
    embeddings = Embeddings(backend, max_body_bytes=max_body_bytes)
    return [
        Route("/v1/chat/completions", chat.complete, methods=["POST"]),
        Route("/v1/completions", completions.complete, methods=["POST"]),
        Route("/v1/embeddings", embeddings.openai, methods=["POST"]),
        Route("/v1/models", models.list),
        Route("/v1/models/{model:path}", models.one),
    ]


async def _running(request: Request) -> Response:
    return PlainTextResponse("Ollama is running")


async def _healthy(request: Request) -> Response:
    return JSONResponse({"status": "ok"})


async def _version(request: Request) -> Response:
    return JSONResponse({"version": VERSION})
