"""No part of a request makes the demo model fail: messages, tools, schemas, images, options."""

import pytest

from serve_app.api.openapi_operations import SSE, Operation
from serve_app.config.options import Options
from serve_app.replica.replica import ModelReplica
from tests.unit.serve_app.api.operations import (
    body_of,
    check_error,
    name_of,
    path_of,
    replaced,
    values_of,
    with_bodies,
)
from tests.unit.serve_app.fake_replicas import http_client

GENERATING = [
    operation
    for operation in with_bodies()
    if SSE in operation.media_types or operation.path in ("/api/chat", "/api/generate")
]
SHORT = Options(num_predict=2)
# Fields that the demo model refuses, and those that lengthen its answers.
LEFT_OUT = ("think", "reasoning_effort", "reasoning", "max_tokens", "best_of", "n")


@pytest.mark.parametrize("operation", GENERATING, ids=name_of)
async def test_parts_of_another_kind_are_answered_or_refused(
    operation: Operation, demo_replica: ModelReplica
):
    body = {name: value for name, value in body_of(operation).items() if name not in LEFT_OUT}
    if operation.path == "/v1/messages":
        body["max_tokens"] = 2
    body["stream"] = False
    statuses = []
    card = demo_replica.describe()
    async with http_client(demo_replica, options=SHORT, card=card) as client:
        for place, _ in values_of(body):
            for value in ([], {"x": [{}]}):
                changed = body if not place else replaced(body, place, value)
                response = await client.post(path_of(operation), json=changed)
                statuses.append(response.status_code)
                assert response.status_code in (200, 400, 404), (place, value, response.text)
                if response.status_code != 200:
                    check_error(operation.protocol, response.text)
    assert statuses[0] == 200
