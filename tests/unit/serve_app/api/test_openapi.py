"""The OpenAPI document: every route is in it, with the type that parses its body."""

import json
from collections.abc import Iterator
from typing import Any

import pytest
from jsonschema import Draft202012Validator
from starlette.applications import Starlette
from starlette.routing import Mount, Route

from runtime.errors import RequestError
from serve_app.api.auth import PAGE_PATH
from serve_app.api.fields import BodyReader
from serve_app.api.ingress import VERSION
from serve_app.api.openapi import NOT_SERVED
from serve_app.api.openapi_operations import OPERATIONS, Operation
from tests.unit.serve_app.api.api_keys import api_key
from tests.unit.serve_app.api.operations import (
    DOCUMENT,
    AnyReplica,
    WillingManagement,
    body_of,
    name_of,
    path_of,
    schema_of,
    willing,
    with_bodies,
)
from tests.unit.serve_app.fake_replicas import PretendReplica, http_client, ingress

KEY = {"authorization": "Bearer good"}


def routes(app: Starlette) -> Iterator[tuple[str, str]]:
    """Methods and paths; HEAD only where there is no GET. Without the files of the chat page."""
    for route in app.routes:
        if isinstance(route, Mount):
            assert route.path == PAGE_PATH
            continue
        assert isinstance(route, Route) and route.methods is not None
        methods = route.methods - {"HEAD"} if "GET" in route.methods else route.methods
        yield from ((method, route.path_format) for method in methods)


async def test_the_document_describes_exactly_the_routes():
    async with ingress(PretendReplica()) as app:
        served = set(routes(app))
    described = {(each.method, each.path) for each in OPERATIONS}
    missing = served - described
    assert not missing, f"add an Operation for {missing} to serve_app/api/openapi_operations.py"
    assert not described - served
    assert len(described) == len(OPERATIONS)
    documented = {(m.upper(), path) for path, item in DOCUMENT["paths"].items() for m in item}
    assert documented == served


@pytest.mark.parametrize("operation", OPERATIONS, ids=name_of)
async def test_an_operation_names_the_type_that_parses_its_body(operation: Operation, monkeypatch):
    parsed: list[type] = []

    async def read(self: BodyReader, kind: type, request: Any) -> Any:
        parsed.append(kind)
        raise RequestError("seen")

    monkeypatch.setattr(BodyReader, "read", read)
    async with http_client(PretendReplica(), management=WillingManagement()) as client:
        await client.request(operation.method, path_of(operation), json={})
    assert parsed == ([] if operation.body is None else [operation.body])


@pytest.mark.parametrize("operation", with_bodies(), ids=name_of)
async def test_valid_requests_satisfy_their_schema_and_are_answered(operation: Operation):
    body = body_of(operation)
    Draft202012Validator(schema_of(operation)).validate(without_nulls(body))
    async with http_client(AnyReplica(), **willing()) as client:
        response = await client.request(operation.method, path_of(operation), json=body)
    assert response.status_code == 200, response.text
    media_type = response.headers.get("content-type", "").partition(";")[0]
    described = DOCUMENT["paths"][operation.path][operation.method.lower()]["responses"]["2XX"]
    assert media_type in described.get("content", {"": None})


WRONG = [
    ("/api/chat", {"options": {"temperature": "hot"}}),
    ("/api/chat", {"options": {"stop": [""]}}),
    ("/api/chat", {"messages": [{"content": "x"}]}),
    ("/api/create", {"renderer": "x"}),
    ("/v1/chat/completions", {"temperature": 3}),
    ("/v1/chat/completions", {"max_tokens": 0}),
    ("/v1/messages", {"max_tokens": -1}),
    ("/v1/chat/completions", {"tools": [{"function": {"name": "a b"}}]}),
    ("/v1/completions", {"top_p": 1.5}),
    ("/v1/messages", {"top_k": -2}),
    ("/v1/messages", {"top_k": 40.7}),
    ("/v1/messages", {"mcp_servers": [1]}),
]


@pytest.mark.parametrize(("path", "change"), WRONG, ids=str)
async def test_requests_that_a_schema_excludes_are_refused(path: str, change: dict[str, Any]):
    (operation,) = (each for each in OPERATIONS if each.path == path)
    body = body_of(operation) | change
    assert not Draft202012Validator(schema_of(operation)).is_valid(body)
    async with http_client(AnyReplica(), **willing()) as client:
        response = await client.post(path, json=body)
    assert response.status_code == 400


async def test_the_schema_of_a_limit_has_the_value_for_no_limit():
    (operation,) = (each for each in OPERATIONS if each.path == "/v1/chat/completions")
    body = body_of(operation) | {"max_tokens": -1, "max_completion_tokens": -1}
    Draft202012Validator(schema_of(operation)).validate(without_nulls(body))


@pytest.mark.parametrize(
    ("name", "first"),
    [
        ("OpenAIChatCompletionBody", ["model", "messages"]),
        ("OpenAICompletionBody", ["model", "prompt"]),
        ("OllamaChatBody", ["model", "messages"]),
    ],
)
def test_fields_that_readers_look_for_come_first(name: str, first: list[str]):
    properties = DOCUMENT["components"]["schemas"][name]["properties"]
    assert list(properties)[: len(first)] == first
    served = [each.get("description") != NOT_SERVED for each in properties.values()]
    assert served == sorted(served, reverse=True)
    assert name != "OpenAIChatCompletionBody" or not served[-1]


def test_the_schemas_are_valid_and_their_references_resolve():
    schemas = DOCUMENT["components"]["schemas"]
    for schema in schemas.values():
        Draft202012Validator.check_schema(schema)
    found = set(references(DOCUMENT))
    assert found
    assert found <= {f"#/components/schemas/{name}" for name in schemas}


def references(value: Any) -> Iterator[str]:
    if isinstance(value, dict):
        if isinstance(value.get("$ref"), str):
            yield value["$ref"]
        for item in value.values():
            yield from references(item)
    elif isinstance(value, list):
        for item in value:
            yield from references(item)


async def test_the_document_needs_an_api_key_like_the_version():
    async with http_client(PretendReplica(), api_keys=(api_key("good"),)) as client:
        for path in ("/openapi.json", "/api/version"):
            assert (await client.get(path)).status_code == 401
        response = await client.get("/openapi.json", headers=KEY)
    assert response.headers["content-type"] == "application/json"
    assert response.json()["info"]["version"] == VERSION
    assert response.json()["paths"].keys() == DOCUMENT["paths"].keys()


@pytest.mark.parametrize("keyed", [False, True])
async def test_the_document_says_which_operations_need_a_key(keyed: bool):
    keys = (api_key("good"),) if keyed else None
    async with http_client(AnyReplica(), **willing(), api_keys=keys) as client:
        document = (await client.get("/openapi.json", headers=KEY)).json()
        for operation in OPERATIONS:
            response = await client.request(operation.method, path_of(operation))
            described = document["paths"][operation.path][operation.method.lower()]
            security = described.get("security", document["security"])
            assert (response.status_code == 401) == (security != [] and {} not in security)


def without_nulls(value: Any) -> Any:
    """Null means absent."""
    return json.loads(
        json.dumps(value), object_hook=lambda d: {n: v for n, v in d.items() if v is not None}
    )
