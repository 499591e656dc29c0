"""The HTTP application: routes, middleware, error handlers."""

import asyncio
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from functools import partial
from importlib.metadata import version

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.middleware.cors import CORSMiddleware
from starlette.middleware.errors import ServerErrorMiddleware
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from runtime.errors import CaravanError
from serve_app.api.anthropic import AnthropicMessages
from serve_app.api.auth import RequireKey, require_management_key
from serve_app.api.bodies import BodyLimits
from serve_app.api.connections import ConnectionRules
from serve_app.api.cross_site import (
    LOCAL_ORIGINS,
    RefuseForeignHost,
    RefuseForeignOrigin,
    origin_pattern,
)
from serve_app.api.embeddings import Embeddings
from serve_app.api.error_bodies import on_error, on_http_error
from serve_app.api.fields import BodyReader
from serve_app.api.keys import ApiKey
from serve_app.api.limits import Limiter, Limits
from serve_app.api.models import Models
from serve_app.api.monitoring import Monitoring
from serve_app.api.observing import ID_HEADERS, ObserveRequests, Telemetry
from serve_app.api.ollama import OllamaChat
from serve_app.api.ollama_management import OllamaManagement
from serve_app.api.ollama_models import OllamaModels
from serve_app.api.openai_chat import OpenAIChat
from serve_app.api.openai_completions import OpenAICompletions
from serve_app.api.openapi import encoded_document
from serve_app.api.pages import page_routes
from serve_app.api.rate_limiting import HEADERS as RATE_LIMIT_HEADERS
from serve_app.api.rate_limiting import LimitRequests
from serve_app.api.request_checks import Check, CheckRequests
from serve_app.api.request_images import ImageReader, ImageRules
from serve_app.api.reranking import Reranking
from serve_app.api.responses import OpenAIResponses
from serve_app.api.responses_history import ResponseHistory
from serve_app.api.tenant import tenant_by_address
from serve_app.api.through_proxy import ThroughProxy
from serve_app.api.tokenization import Tokenization
from serve_app.api.trace_header import PermitTraces
from serve_app.config.settings import AppSettings
from serve_app.gateway.backend import ChatBackend
from serve_app.gateway.model_management import ModelManagement
from serve_app.gateway.readiness import Readiness
from serve_app.responses.stored_responses import StoredResponses
from serve_app.telemetry.exposition import no_exposition
from serve_app.telemetry.meter import NoMeter

VERSION = version("caravan")
# The Ollama release whose API is served. Clients require a minimum: 0.6.4 (VS Code), 0.13.4
# (Codex). 0.13.5 is the last release without /v1/messages, which is served here too.
OLLAMA_VERSION = "0.13.5"


@dataclass(frozen=True, slots=True, kw_only=True)
class IngressOptions:
    """Access, limits and request formats of the HTTP surface.

    `api_keys`: None on a server without API keys. `concurrent_requests`: the limit of one tenant,
    over all `processes` of the ingress. `proxy_secret`: the secret that HAProxy adds to each
    request; None: requests are accepted without it. `trace_without_keys`: see `PermitTraces`.
    """

    api_keys: tuple[ApiKey, ...] | None
    body_limits: BodyLimits
    image_rules: ImageRules
    allowed_origins: tuple[str, ...] = ()
    allowed_hosts: tuple[str, ...] | None = None
    concurrent_requests: int | None = None
    processes: int = 1
    clock: Callable[[], float] = time.monotonic
    strict_fields: bool = False
    proxy_secret: str | None = None
    trace_without_keys: bool = False

    @classmethod
    def of(
        cls, settings: AppSettings, api_keys: tuple[ApiKey, ...] | None, proxy_secret: str | None
    ) -> "IngressOptions":
        return cls(
            api_keys=api_keys,
            body_limits=BodyLimits.of(settings),
            image_rules=ImageRules.of(settings),
            allowed_origins=settings.allowed_origins,
            allowed_hosts=settings.allowed_hosts,
            concurrent_requests=settings.concurrent_requests,
            processes=settings.ingress_replicas,
            strict_fields=settings.strict_fields,
            proxy_secret=proxy_secret,
            trace_without_keys=settings.trace_without_keys,
        )


def ingress_app(
    backend: ChatBackend,
    options: IngressOptions,
    management: ModelManagement | None = None,
    stored: StoredResponses | None = None,
    telemetry: Telemetry | None = None,
    readiness: Readiness | None = None,
) -> Starlette:
    """The ASGI application of one ingress process. Its shutdown delivers changes of `stored`.

    `readiness`: None if the models have started before.
    """
    telemetry = telemetry or Telemetry(meter=NoMeter(), exposition=no_exposition)
    api_keys, concurrent_requests = options.api_keys, options.concurrent_requests
    limits = {key.name: key.limits(concurrent_requests) for key in api_keys or ()}
    default = Limits(concurrent_requests=concurrent_requests)
    limiter = Limiter(default, limits, processes=options.processes, clock=options.clock)
    bodies = BodyReader(options.body_limits, strict=options.strict_fields)
    images = ImageReader(backend, options.image_rules)
    history = ResponseHistory(stored, options.body_limits)
    secret = options.proxy_secret

    @asynccontextmanager
    async def lifespan(app: Starlette) -> AsyncIterator[None]:
        yield
        if stored is not None:
            await stored.deliver()

    return Starlette(
        routes=[
            *page_routes(),
            *_plain_routes(readiness, keyed=api_keys is not None),
            *_ollama_routes(backend, images, bodies),
            *_management_routes(management, bodies, keyed=api_keys is not None),
            *_monitoring_routes(
                Monitoring(telemetry.exposition, backend.registry), keyed=api_keys is not None
            ),
            *_openai_routes(backend, images, bodies),
            *_responses_routes(OpenAIResponses(backend, images, bodies, history)),
            *_anthropic_routes(backend, images, bodies),
        ],
        middleware=[
            Middleware(ObserveRequests, telemetry=telemetry),
            *([] if secret is None else [Middleware(CheckRequests, checks=[ThroughProxy(secret)])]),
            *_middleware(options, limiter),
        ],
        exception_handlers={CaravanError: on_error, HTTPException: on_http_error},
        lifespan=lifespan,
    )


def _middleware(options: IngressOptions, limiter: Limiter) -> list[Middleware]:
    """Outermost first. CORS headers are added to error responses too, so that pages can read them;
    preflight requests, which carry no key, are answered before requests are checked.
    """
    origins = origin_pattern((*LOCAL_ORIGINS, *options.allowed_origins))
    return [
        Middleware(ConnectionRules),
        Middleware(
            CORSMiddleware,
            allow_origin_regex=origins,
            allow_methods=("GET", "HEAD", "POST", "DELETE"),
            allow_headers=("*",),
            expose_headers=("Retry-After", *ID_HEADERS, *RATE_LIMIT_HEADERS),
            allow_private_network=True,
        ),
        Middleware(CheckRequests, checks=_checks(options, origins)),
        Middleware(LimitRequests, limiter=limiter),
        Middleware(ServerErrorMiddleware, handler=on_error),
    ]


def _checks(options: IngressOptions, origins: str) -> list[Check]:
    keys, hosts = options.api_keys, options.allowed_hosts
    checks: list[Check] = []
    if keys is None:
        checks.append(RefuseForeignOrigin(origins, remedy="see `allowed_origins`"))
    if keys is None or hosts is not None:
        checks.append(RefuseForeignHost(hosts or ()))
    checks.append(tenant_by_address if keys is None else RequireKey(keys))
    checks.append(PermitTraces(without_keys=options.trace_without_keys))
    return checks


def _plain_routes(readiness: Readiness | None, *, keyed: bool) -> list[Route]:
    ready = partial(_ready, readiness=readiness)
    return [
        Route("/healthz", _healthy),
        Route("/readyz", ready),
        Route("/health", ready),  # llama.cpp's and vLLM's servers answer it when models are loaded
        Route("/api/version", _version),
        Route("/openapi.json", partial(_openapi, keyed=keyed)),
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
    management: ModelManagement | None, bodies: BodyReader, *, keyed: bool
) -> list[Route]:
    """With API keys, only keys with `manage` may manage models. Without keys, only local pages may,
    whatever `allowed_origins` permits.
    """
    models = OllamaManagement(management, bodies)
    guard = _management_guard(keyed=keyed)
    return [
        Route(path, endpoint, methods=[method], middleware=guard)
        for method, path, endpoint in (
            ("POST", "/api/pull", models.pull),
            ("POST", "/api/create", models.create),
            ("POST", "/api/copy", models.copy),
            ("DELETE", "/api/delete", models.delete),
            ("HEAD", "/api/blobs/{digest}", models.has_blob),
            ("POST", "/api/blobs/{digest}", models.upload_blob),
            ("POST", "/api/push", models.push),
        )
    ]


def _monitoring_routes(monitoring: Monitoring, *, keyed: bool) -> list[Route]:
    """The metrics have the names of all keys and models."""
    return [
        Route("/metrics", monitoring.metrics, middleware=_management_guard(keyed=keyed)),
        Route("/status.json", monitoring.status),
    ]


def _management_guard(*, keyed: bool) -> list[Middleware]:
    remedy = "without API keys only local pages may manage models"
    local = RefuseForeignOrigin(origin_pattern(LOCAL_ORIGINS), remedy)
    check: Check = require_management_key if keyed else local
    return [Middleware(CheckRequests, checks=[check])]


def _openai_routes(backend: ChatBackend, images: ImageReader, bodies: BodyReader) -> list[Route]:
    chat = OpenAIChat(backend, images, bodies)
    completions = OpenAICompletions(backend, bodies)
    models = Models(backend)
    embeddings = Embeddings(backend, bodies)
    reranking = Reranking(backend, bodies)
    tokens = Tokenization(backend, images, bodies)
    return [
        Route("/tokenize", tokens.tokenize, methods=["POST"]),
        Route("/detokenize", tokens.detokenize, methods=["POST"]),
        Route("/v1/chat/completions", chat.complete, methods=["POST"]),
        Route("/v1/completions", completions.complete, methods=["POST"]),
        Route("/v1/embeddings", embeddings.openai, methods=["POST"]),
        Route("/v1/rerank", reranking.rerank, methods=["POST"]),
        Route("/v1/score", reranking.score, methods=["POST"]),
        Route("/v1/models", models.list),
        Route("/v1/models/{model:path}", models.one),
    ]


def _responses_routes(responses: OpenAIResponses) -> list[Route]:
    return [
        Route("/v1/responses", responses.create, methods=["POST"]),
        Route("/v1/responses/input_tokens", responses.count, methods=["POST"]),
        Route("/v1/responses/{id}", responses.retrieve),
        Route("/v1/responses/{id}", responses.delete, methods=["DELETE"]),
        Route("/v1/responses/{id}/cancel", responses.cancel, methods=["POST"]),
        Route("/v1/responses/{id}/input_items", responses.input_items),
    ]


def _anthropic_routes(backend: ChatBackend, images: ImageReader, bodies: BodyReader) -> list[Route]:
    messages = AnthropicMessages(backend, images, bodies)
    return [
        Route("/v1/messages", messages.create, methods=["POST"]),
        Route("/v1/messages/count_tokens", messages.count, methods=["POST"]),
    ]


async def _healthy(request: Request) -> Response:
    return JSONResponse({"status": "ok"})


async def _ready(request: Request, *, readiness: Readiness | None) -> Response:
    if readiness is None or readiness.reached:
        return JSONResponse({"status": "ok"})
    return JSONResponse({"status": "models are starting"}, status_code=503)


async def _version(request: Request) -> Response:
    return JSONResponse({"version": OLLAMA_VERSION, "caravan": VERSION})


async def _openapi(request: Request, *, keyed: bool) -> Response:
    # 0.1 s the first time
    document = await asyncio.to_thread(encoded_document, VERSION, keyed=keyed)
    return Response(document, media_type="application/json")
