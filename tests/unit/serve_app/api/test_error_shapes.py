"""Errors of every kind on every route: the status, and the error body of the route's protocol."""

import asyncio
from typing import Any

import httpx
import pytest

from runtime.errors import (
    GenerationFailedError,
    ModelUnavailableError,
    OverloadedError,
    PromptTooLongError,
)
from serve_app.api.openapi_operations import NDJSON, OPERATIONS, SSE, Operation, Protocol
from serve_app.api.refusals import BUSY
from tests.unit.serve_app.api.api_keys import api_key
from tests.unit.serve_app.api.operations import (
    AnyReplica,
    body_of,
    check_error,
    name_of,
    path_of,
    willing,
    with_bodies,
)
from tests.unit.serve_app.fake_replicas import http_client

KEYS = (api_key("good"), api_key("slow", manage=True, requests_per_minute=1))
FOREIGN = {"origin": "https://evil.example"}
MANAGING = tuple(
    each
    for each in OPERATIONS
    if each.path.startswith(
        ("/api/pull", "/api/push", "/api/create", "/api/copy", "/api/delete", "/api/blobs")
    )
)
# The limit of requests per minute does not count what only reads.
COUNTED = [each for each in OPERATIONS if each.method not in ("GET", "HEAD")]
NAMED = [each for each in with_bodies() if each not in MANAGING]
INFERRING = [each for each in NAMED if each.path != "/api/show"]
# A stream of /v1/responses ends with the event `response.failed`; see test_responses.
STREAMED = [
    each
    for each in INFERRING
    if {NDJSON, SSE} & set(each.media_types) and each.path != "/v1/responses"
]


async def sent(
    operation: Operation,
    *,
    replica: AnyReplica | None = None,
    headers: dict[str, str] | None = None,
    content: bytes | None = None,
    times: int = 1,
    change: dict[str, Any] | None = None,
    **access: Any,
) -> httpx.Response:
    """The response to a valid request, or to the last of several, as `change` and `access` say."""
    body: dict[str, Any] = {"content": content}
    if content is None and operation.body is not None:
        body = {"json": body_of(operation) | (change or {})}
    async with http_client(replica or AnyReplica(), **willing() | access) as client:
        for _ in range(times):
            response = await client.request(
                operation.method, path_of(operation), headers=headers, **body
            )
    return response


def check(operation: Operation, response: httpx.Response, status: int, reported: str = "") -> None:
    assert response.status_code == status, response.text
    if operation.method != "HEAD":
        assert reported in check_error(operation.protocol, response.text)
        assert response.headers["content-type"].startswith("application/json")


@pytest.mark.parametrize("operation", OPERATIONS, ids=name_of)
async def test_without_a_key_it_is_401(operation: Operation):
    response = await sent(operation, api_keys=KEYS)
    if operation.path in ("/healthz", "/readyz", "/health", "/", "/status", "/docs"):
        assert response.status_code == 200
    else:
        check(operation, response, 401, "a valid API key is required")


@pytest.mark.parametrize("operation", OPERATIONS, ids=name_of)
async def test_a_page_of_another_origin_gets_403(operation: Operation):
    response = await sent(operation, headers=FOREIGN)
    check(operation, response, 403, "web pages of origin 'https://evil.example' are not allowed")


@pytest.mark.parametrize("operation", MANAGING, ids=name_of)
async def test_a_key_that_may_not_manage_models_gets_403(operation: Operation):
    headers = {"authorization": "Bearer good"}
    response = await sent(operation, api_keys=KEYS, headers=headers)
    check(operation, response, 403, "lacks `manage: true`")


@pytest.mark.parametrize("operation", MANAGING, ids=name_of)
async def test_a_server_that_does_not_manage_models_says_403(operation: Operation):
    check(operation, await sent(operation, management=None), 403, "models are not managed")


@pytest.mark.parametrize("operation", COUNTED, ids=name_of)
async def test_beyond_the_limit_of_requests_it_is_429(operation: Operation):
    headers = {"authorization": "Bearer slow"}
    response = await sent(operation, api_keys=KEYS, headers=headers, times=2)
    check(operation, response, 429, "has reached its limit `requests_per_minute`")
    assert int(response.headers["retry-after"]) >= 1


@pytest.mark.parametrize("operation", OPERATIONS, ids=name_of)
async def test_an_unknown_method_is_405(operation: Operation):
    async with http_client(AnyReplica(), **willing()) as client:
        response = await client.request("PATCH", path_of(operation))
    assert response.status_code == 405
    assert operation.method in response.headers["allow"]
    if operation.protocol is Protocol.OLLAMA:  # as Ollama does
        assert response.text == "Method Not Allowed"
    else:
        check(operation, response, 405, "Method Not Allowed")


@pytest.mark.parametrize("operation", NAMED, ids=name_of)
async def test_an_unknown_model_is_404(operation: Operation):
    response = await sent(operation, change={"model": "missing"})
    check(operation, response, 404, "model 'missing' not found")


async def test_a_body_beyond_the_limit_is_413():
    responses = [sent(operation, content=b" " * 70_000) for operation in with_bodies()]
    for operation, response in zip(with_bodies(), await asyncio.gather(*responses), strict=True):
        check(operation, response, 413, "`max_body_bytes`")


@pytest.mark.parametrize("operation", with_bodies(), ids=name_of)
async def test_a_body_without_json_is_400(operation: Operation):
    bodies = (
        (b"", "missing request body"),
        (b"{", "invalid JSON"),
        (b'{"model": "\\ud800"}', "\\ud800 (byte 11) is half of a UTF-16 surrogate pair"),
        (b'{"model": "\xed\xa0\x80"}', "byte 11 is 0xed, which is not UTF-8"),
    )
    for content, reported in bodies:
        check(operation, await sent(operation, content=content), 400, reported)


@pytest.mark.parametrize("operation", with_bodies(), ids=name_of)
async def test_a_compressed_body_is_415(operation: Operation):
    response = await sent(operation, headers={"content-encoding": "gzip"})
    check(operation, response, 415, "content encoding 'gzip' is not supported")


@pytest.mark.parametrize("operation", with_bodies(), ids=name_of)
async def test_content_type_is_never_a_reason_to_refuse(operation: Operation):
    for media_type in ("text/plain", "application/x-www-form-urlencoded", "%"):
        response = await sent(operation, headers={"content-type": media_type})
        assert response.status_code == 200, response.text


FAILURES = [
    (OverloadedError("full"), 503, f"{BUSY}: full"),
    (PromptTooLongError("long"), 400, "long"),
    (ModelUnavailableError("no GPU"), 503, "no GPU"),
    (GenerationFailedError("broken"), 500, "broken"),
]


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(("error", "status", "reported"), FAILURES, ids=str)
@pytest.mark.parametrize("operation", INFERRING, ids=name_of)
async def test_a_failure_before_the_first_token_has_its_status(
    operation: Operation, error: Exception, status: int, reported: str, stream: bool
):
    replica = AnyReplica()
    replica.error = error
    change = {"stream": stream, "best_of": None}
    response = await sent(operation, replica=replica, change=change)
    if stream and status == 400 and operation.path == "/v1/responses":
        assert response.status_code == 200  # as from OpenAI, the stream begins and fails
        return
    check(operation, response, status, reported)
    assert (status == 503) == ("retry-after" in response.headers)


@pytest.mark.parametrize("operation", STREAMED, ids=name_of)
async def test_a_failure_within_a_stream_ends_it_with_an_error_body(operation: Operation):
    replica = AnyReplica()
    replica.fails_after = 1
    response = await sent(operation, replica=replica, change={"stream": True, "best_of": None})
    assert response.status_code == 200
    last = response.text.strip().splitlines()[-1]
    assert check_error(operation.protocol, last.removeprefix("data: ")) == "the engine broke"


@pytest.mark.parametrize(
    ("path", "protocol"),
    [
        ("/v1/nothing", Protocol.OPENAI),
        ("/v1", Protocol.OPENAI),
        ("/v1/messages/batches", Protocol.ANTHROPIC),
        ("/api/nothing", None),
        ("/nothing", None),
    ],
)
async def test_an_unknown_path_is_404(path: str, protocol: Protocol | None):
    async with http_client(AnyReplica()) as client:
        response = await client.post(path, json={})
    assert response.status_code == 404
    if protocol is None:  # as Ollama does
        assert response.text == "Not Found"
    else:
        assert "Not Found" in check_error(protocol, response.text)
