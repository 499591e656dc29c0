"""No part of a request makes the demo model fail: messages, tools, schemas, images, options."""

from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager

import httpx
import pytest

from serve_app.api.bodies import BodyLimits
from serve_app.api.ingress import IngressOptions, ingress_app
from serve_app.api.openapi_operations import SSE, Operation
from serve_app.api.request_images import ImageRules
from serve_app.config.options import Options
from serve_app.config.settings import ModelSettings
from serve_app.gateway.model_registry import ServedModel
from serve_app.replica.loading import load_replica
from serve_app.replica.replica import ModelReplica
from serve_app.transport.generation import generation_server
from tests.checkout import DEMO_MODEL
from tests.unit.serve_app.api.operations import (
    body_of,
    check_error,
    name_of,
    path_of,
    replaced,
    values_of,
    with_bodies,
)
from tests.unit.serve_app.fake_replicas import OneReplica, backend_of

GENERATING = [
    operation
    for operation in with_bodies()
    if SSE in operation.media_types or operation.path in ("/api/chat", "/api/generate")
]
SHORT = Options(num_predict=2)
# Fields that the demo model refuses, and those that lengthen its answers.
LEFT_OUT = ("think", "reasoning_effort", "reasoning", "max_tokens", "best_of", "n")


@pytest.fixture(scope="module")
def replica() -> Iterator[ModelReplica]:
    settings = ModelSettings(
        name="demo", source=str(DEMO_MODEL), context_tokens=768, max_sequences=2
    )
    replica = load_replica(settings)
    yield replica
    replica.close()


@asynccontextmanager
async def client_of(replica: ModelReplica) -> AsyncIterator[httpx.AsyncClient]:
    server = generation_server(replica.generate)
    replicas = OneReplica(await server.start("127.0.0.1"), replica.describe())
    backend = backend_of(replicas, ServedModel("demo", SHORT))
    options = IngressOptions(
        api_keys=None, body_limits=BodyLimits(1 << 20), image_rules=ImageRules()
    )
    transport = httpx.ASGITransport(ingress_app(backend, options), raise_app_exceptions=False)
    try:
        async with httpx.AsyncClient(transport=transport, base_url="http://test") as client:
            yield client
    finally:
        backend.close()
        await server.close(drain_s=1.0)


@pytest.mark.parametrize("operation", GENERATING, ids=name_of)
async def test_parts_of_another_kind_are_answered_or_refused(
    operation: Operation, replica: ModelReplica
):
    body = {name: value for name, value in body_of(operation).items() if name not in LEFT_OUT}
    if operation.path == "/v1/messages":
        body["max_tokens"] = 2
    body["stream"] = False
    statuses = []
    async with client_of(replica) as client:
        for place, _ in values_of(body):
            for value in ([], {"x": [{}]}):
                changed = body if not place else replaced(body, place, value)
                response = await client.post(path_of(operation), json=changed)
                statuses.append(response.status_code)
                assert response.status_code in (200, 400, 404), (place, value, response.text)
                if response.status_code != 200:
                    check_error(operation.protocol, response.text)
    assert statuses[0] == 200
