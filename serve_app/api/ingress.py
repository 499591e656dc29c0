"""The HTTP surface as one ASGI application: routes, who may use them, error bodies."""

import time
from collections.abc import Callable

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.middleware.cors import CORSMiddleware
from starlette.middleware.errors import ServerErrorMiddleware
from starlette.requests import Request
from starlette.responses import JSONResponse, PlainTextResponse, Response
from starlette.routing import Route

from runtime.errors import CaravanError
from serve_app.api.auth import RequireKey, RequireManagementKey
from serve_app.api.bodies import BodyLimits
from serve_app.api.connections import WholeForHttp10
from serve_app.api.cross_site import (
    LOCAL_ORIGINS,
    RefuseForeignHost,
    RefuseForeignOrigin,
    origin_pattern,
)
from serve_app.api.embeddings import Embeddings
from serve_app.api.errors import on_error, on_http_error
from serve_app.api.fields import BodyReader
from serve_app.api.keys import ApiKey
from serve_app.api.limits import Limiter, Limits
from serve_app.api.ollama import OllamaChat
from serve_app.api.ollama_management import OllamaManagement
from serve_app.api.ollama_models import OllamaModels
from serve_app.api.openai import OpenAIModels
from serve_app.api.openai_chat import OpenAIChat
from serve_app.api.openai_completions import OpenAICompletions
from serve_app.api.rate_limiting import HEADERS as RATE_LIMIT_HEADERS
from serve_app.api.rate_limiting import LimitRequests
from serve_app.api.request_images import ImageReader, ImageRules
from serve_app.api.tenant import TenantByAddress
from serve_app.api.through_proxy import ThroughProxy
from serve_app.gateway.backend import ChatBackend
from serve_app.on_demand.management import Management

VERSION = "0.1.0"
# The release of Ollama whose API is served. Clients ask for a minimum: 0.6.4 (VS Code), 0.13.4
# (Codex). It is the last one without /v1/messages, which is not served; nor is its /v1/responses.
OLLAMA_VERSION = "0.13.5"


def ingress_app(
    backend: ChatBackend,
    management: Management | None = None,
    *,
    api_keys: tuple[ApiKey, ...] | None,
    allowed_origins: tuple[str, ...] = (),
    allowed_hosts: tuple[str, ...] | None = None,
    concurrent_requests: int | None = None,
    processes: int = 1,
    clock: Callable[[], float] = time.monotonic,
    body_limits: BodyLimits,
    strict_fields: bool = False,
    image_rules: ImageRules,
    proxy_secret: str | None = None,
) -> Starlette:
    """`concurrent_requests`: of one tenant, over all `processes` of the ingress.

    `proxy_secret`: what HAProxy adds to each request; None: requests come from anywhere.
    """
    limits = {key.name: key.limits(concurrent_requests) for key in api_keys or ()}
    default = Limits(concurrent_requests=concurrent_requests)
    limiter = Limiter(default, limits, processes=processes, clock=clock)
    bodies = BodyReader(body_limits, strict=strict_fields)
    images = ImageReader(backend, image_rules)
    return Starlette(
        routes=[
            *_plain_routes(),
            *_ollama_routes(backend, images, bodies),
            *_management_routes(management, bodies, keyed=api_keys is not None),
            *_openai_routes(backend, images, bodies),
        ],
        middleware=[
            *([] if proxy_secret is None else [Middleware(ThroughProxy, secret=proxy_secret)]),
            *_middleware(api_keys, limiter, allowed_origins, allowed_hosts),
        ],
        exception_handlers={CaravanError: on_error, HTTPException: on_http_error},
    )


def _middleware(
    api_keys: tuple[ApiKey, ...] | None,
    limiter: Limiter,
    allowed_origins: tuple[str, ...],
    allowed_hosts: tuple[str, ...] | None,
) -> list[Middleware]:
    """From the outside in. Pages get the headers of CORS with errors too, so that they can read
    them, and preflights, which carry no keys, are answered before keys are asked for."""
    origins = origin_pattern((*LOCAL_ORIGINS, *allowed_origins))
    middleware = [Middleware(WholeForHttp10)]
    if api_keys is None:
        remedy = "see `allowed_origins`"
        middleware.append(Middleware(RefuseForeignOrigin, allowed=origins, remedy=remedy))
    middleware.append(
        Middleware(
            CORSMiddleware,
            allow_origin_regex=origins,
            allow_methods=("GET", "HEAD", "POST", "DELETE"),
            allow_headers=("*",),
            expose_headers=("Retry-After", *RATE_LIMIT_HEADERS),
            allow_private_network=True,
        )
    )
    if api_keys is None or allowed_hosts is not None:
        middleware.append(Middleware(RefuseForeignHost, allowed=allowed_hosts or ()))
    if api_keys is None:
        middleware.append(Middleware(TenantByAddress))
    else:
        middleware.append(Middleware(RequireKey, keys=api_keys))
    middleware.append(Middleware(LimitRequests, limiter=limiter))
    return [*middleware, Middleware(ServerErrorMiddleware, handler=on_error)]


def _plain_routes() -> list[Route]:
    return [
        Route("/", _running),
        Route("/healthz", _healthy),
        Route("/api/version", _version),
    ]


def _ollama_routes(backend: ChatBackend, images: ImageReader, bodies: BodyReader) -> list[Route]:
    chat = OllamaChat(backend, images, bodies)
    models = OllamaModels(backend, bodies)
    embeddings = Embeddings(backend, bodies)
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
    management: Management | None, bodies: BodyReader, *, keyed: bool
) -> list[Route]:
    """Only keys with `manage` may manage models; without keys only local pages may, whatever
    `allowed_origins` says."""
    models = OllamaManagement(management, bodies)
    remedy = "without API keys only local pages may manage models"
    allowed = origin_pattern(LOCAL_ORIGINS)
    local = Middleware(RefuseForeignOrigin, allowed=allowed, remedy=remedy)
    guard = [Middleware(RequireManagementKey) if keyed else local]
    return [
        Route(path, endpoint, methods=[method], middleware=guard)
        for method, path, endpoint in (
            ("POST", "/api/pull", models.pull),
            ("POST", "/api/create", models.create),
            ("POST", "/api/copy", models.copy),
            ("DELETE", "/api/delete", models.delete),
            ("HEAD", "/api/blobs/{digest}", models.has_blob),
            ("POST", "/api/blobs/{digest}", models.bring_blob),
            ("POST", "/api/push", models.push),
        )
    ]


def _openai_routes(backend: ChatBackend, images: ImageReader, bodies: BodyReader) -> list[Route]:
    chat = OpenAIChat(backend, images, bodies)
    completions = OpenAICompletions(backend, bodies)
    models = OpenAIModels(backend)
    embeddings = Embeddings(backend, bodies)
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
    return JSONResponse({"version": OLLAMA_VERSION, "caravan": VERSION})
