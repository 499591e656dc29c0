"""A fake model behind a real direct stream, for tests of the gateway and the protocols."""

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any

import anthropic
import httpx
import httpx2
import ollama
import openai
from starlette.applications import Starlette

from runtime.engine.request import FinishReason, Usage
from runtime.errors import CaravanError, GenerationFailedError
from serve_app.api.bodies import BodyLimits
from serve_app.api.ingress import IngressOptions, ingress_app
from serve_app.api.keys import ApiKey
from serve_app.api.observing import Telemetry
from serve_app.api.request_images import ImageRules
from serve_app.config.options import Options
from serve_app.gateway.backend import ChatBackend
from serve_app.gateway.failover import FailoverRules
from serve_app.gateway.model_registry import ModelRegistry, ServedModel
from serve_app.gateway.readiness import Readiness
from serve_app.messages.listing import LoadedModel
from serve_app.messages.model_card import ModelCard
from serve_app.messages.replica_status import ReplicaStatus
from serve_app.messages.tasks import (
    Candidate,
    ChatDelta,
    ChatTask,
    ReplyOpening,
    TokenLogprob,
)
from serve_app.telemetry.request_spans import spanned_replies
from serve_app.transport.generation import generation_server
from serve_app.transport.wire import Address
from tests.patience import HANG_S

CARD = ModelCard(
    name="demo",
    architecture="llama",
    quantization="Q8_0",
    parameter_count=4_500_000,
    file_bytes=4_421_088,
    digest="ab" * 32,
    modified_at=1_700_000_000.25,
    context_length=512,
    embedding_length=64,
    chat_template="{{ messages }}",
    license=None,
    context_tokens=512,
    device="cpu",
    reserved_bytes=10_000_000,
    device_bytes=0,
    pid=1,
    metadata={"general.name": "Demo", "general.architecture": "llama", "llama.block_count": 4},
    tensors=(("token_embd.weight", "Q8_0", (64, 512)),),
)
USAGE = Usage(7, 4, 3, 1_000, 2_000, 3_000)


class PretendReplica:
    """Answers with its words, one delta each; records its tasks and counts aborted ones."""

    def __init__(
        self,
        words: tuple[str, ...] = ("Hello", ", ", "world"),
        opening: ReplyOpening | None = None,
    ) -> None:
        self.words = words
        self.opening = opening
        self.error: CaravanError | None = None
        self.fails_after: int | None = None
        self.waits = asyncio.Event()
        self.waits.set()
        self.tasks: list[ChatTask] = []
        self.left = 0

    async def generate(self, task: ChatTask) -> AsyncGenerator[ChatDelta, None]:
        self.tasks.append(task)
        ended = False
        try:
            if self.error is not None:
                raise self.error
            for index, word in enumerate(self.words):
                if index == self.fails_after:
                    ended = True
                    raise GenerationFailedError("the engine broke")
                opening = None if index else self.opening
                yield ChatDelta(word, (index,), _logprobs(task, word, index), opening=opening)
                await self.waits.wait()
            prompt = (7, 8) if task.prompt_wanted else ()
            yield ChatDelta(finish=FinishReason.STOP, usage=USAGE, tokens=(99,), prompt=prompt)
            ended = True
        finally:
            self.left += not ended


def _logprobs(task: ChatTask, word: str, index: int) -> tuple[TokenLogprob, ...]:
    if task.sampling.logprobs is None:
        return ()
    candidate = Candidate(word, word.encode(), -0.5 * (index + 1))
    return (TokenLogprob(candidate, (candidate,) * task.sampling.logprobs),)


class OneReplica:
    """The replicas of a model of which there is one."""

    def __init__(self, address: Address, card: ModelCard = CARD) -> None:
        self.address = address
        self.card = card
        self.choices = 0
        self.statuses: list[ReplicaStatus] = []

    async def choose(self, task, *, avoid: frozenset[str] = frozenset(), identity=None) -> Address:
        self.choices += 1
        return self.address

    async def choose_earlier(self, task, *, avoid: frozenset[str] = frozenset()) -> None:
        return None

    async def describe(self, *, verbose: bool) -> ModelCard:
        return self.card

    async def ask_all(self, method: str, *arguments, timeout_s: float) -> list[Any]:
        return {"loaded": [LoadedModel.of(self.card)], "status": self.statuses}[method]


def backend_of(
    replicas,
    *models: ServedModel,
    start_timeout_s: float = HANG_S,
    failover: FailoverRules | None = None,
    private_caches: bool = False,
    telemetry: Telemetry | None = None,
) -> ChatBackend:
    """A backend of configured models, by default one without options, that share `replicas`."""
    models = models or (ServedModel("demo", Options()),)
    return ChatBackend(
        ModelRegistry(models, {model.name: replicas for model in models}),
        start_timeout_s=start_timeout_s,
        failover=failover,
        private_caches=private_caches,
        meter=None if telemetry is None else telemetry.meter,
        spans=None if telemetry is None else telemetry.spans,
    )


@asynccontextmanager
async def http_client(
    replica: PretendReplica,
    *,
    prefix: str = "",
    **access: Any,
) -> AsyncIterator[httpx.AsyncClient]:
    """An HTTP client of the whole ingress, with `replica` behind a real direct stream.

    `prefix`: of all paths, as Serve has it for applications that are not at the root. `access`: as
    `ingress` has it.
    """
    async with ingress(replica, **access) as app:
        transport = httpx.ASGITransport(app, raise_app_exceptions=False, root_path=prefix)
        async with httpx.AsyncClient(
            transport=transport, base_url=f"http://test{prefix}"
        ) as client:
            yield client


@dataclass(frozen=True)
class Clients:
    """Official clients of one ingress, and one without a protocol."""

    native: ollama.AsyncClient
    oai: openai.AsyncOpenAI
    anthropic: anthropic.AsyncAnthropic
    raw: httpx.AsyncClient


@asynccontextmanager
async def clients(replica: Any, *, key: str = "any", **access: Any) -> AsyncIterator[Clients]:
    """Of the whole ingress; `access` as `ingress` has it."""
    async with ingress(replica, **access) as app, asyncio.timeout(HANG_S):
        transport = httpx.ASGITransport(app, raise_app_exceptions=False)
        # Two clients are built on httpx's successor, which has transports of its own.
        newer = httpx2.ASGITransport(app, raise_app_exceptions=False)
        shared = {"http_client": httpx2.AsyncClient(transport=newer), "api_key": key}
        yield Clients(
            ollama.AsyncClient("http://test", transport=transport),
            openai.AsyncOpenAI(base_url="http://test/v1", max_retries=0, **shared),
            anthropic.AsyncAnthropic(base_url="http://test", max_retries=0, **shared),
            httpx.AsyncClient(base_url="http://test", transport=transport),
        )


@asynccontextmanager
async def openai_client(replica: Any, **access: Any) -> AsyncIterator[openai.AsyncOpenAI]:
    async with clients(replica, **access) as to:
        yield to.oai


@asynccontextmanager
async def anthropic_client(replica: Any, **access: Any) -> AsyncIterator[anthropic.AsyncAnthropic]:
    async with clients(replica, **access) as to:
        yield to.anthropic


@asynccontextmanager
async def ingress(
    replica: PretendReplica,
    *,
    options: Options | None = None,
    brings_options: bool = False,
    api_keys: tuple[ApiKey, ...] | None = None,
    allowed_origins: tuple[str, ...] = (),
    allowed_hosts: tuple[str, ...] | None = None,
    max_body_bytes: int = 65536,
    max_text_bytes: int = 8 * 2**20,
    budget_bytes: int | None = None,
    grace_s: float = HANG_S,
    strict_fields: bool = False,
    image_rules: ImageRules | None = None,
    card: ModelCard = CARD,
    management: Any = None,
    proxy_secret: str | None = None,
    private_caches: bool = False,
    stored: Any = None,
    telemetry: Telemetry | None = None,
    statuses: list[ReplicaStatus] | None = None,
    readiness: Readiness | None = None,
    **limits: Any,
) -> AsyncIterator[Starlette]:
    """The whole ingress, with `replica` behind a real direct stream; `limits` as the ingress has
    them. `statuses`: what the replicas tell about their engines."""
    spans = None if telemetry is None else telemetry.spans
    server = generation_server(spanned_replies(spans, replica.generate))
    replicas = OneReplica(await server.start("127.0.0.1"), card)
    replicas.statuses = [] if statuses is None else statuses
    model = ServedModel("demo", options or Options(), brings_options)
    backend = backend_of(replicas, model, private_caches=private_caches, telemetry=telemetry)
    try:
        yield ingress_app(
            backend,
            IngressOptions(
                api_keys=api_keys,
                allowed_origins=allowed_origins,
                allowed_hosts=allowed_hosts,
                body_limits=BodyLimits(max_body_bytes, max_text_bytes, budget_bytes, grace_s),
                strict_fields=strict_fields,
                image_rules=image_rules or ImageRules(),
                proxy_secret=proxy_secret,
                **limits,
            ),
            management,
            stored,
            telemetry,
            readiness,
        )
    finally:
        backend.close()
        await server.close(drain_s=1.0)
