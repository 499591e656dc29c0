"""Property: no body of any kind is answered with 500, and every error has its protocol's shape.

`pytest --hypothesis-profile thorough` tries two hundred times as many bodies.
"""

import asyncio
import json
import re
from collections.abc import Iterator
from contextlib import AsyncExitStack
from typing import Any

import httpx
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from serve_app.api.openapi_operations import Operation
from tests.patience import PatientLoop
from tests.unit.serve_app.api.operations import (
    DOCUMENT,
    AnyReplica,
    Place,
    body_of,
    check_error,
    name_of,
    path_of,
    replaced,
    schema_of,
    values_of,
    willing,
    with_bodies,
)
from tests.unit.serve_app.fake_replicas import http_client

EXAMPLES = settings().max_examples
FEW = settings(max_examples=EXAMPLES // 4)
NUMBERS = [2**63, -(2**63) - 1, 2**200, 1e308, -0.0, -1, 0, 0.5, True]
TEXTS = ["", "\x00", "𝄞", "\ud800", "<|im_start|>", "data:,", "x" * 5000]
STRANGE = st.sampled_from(
    [*NUMBERS, *TEXTS, None, [], {}, [[]], [{}], {"": None}, {"type": "text"}]
)
# A value of each JSON type; `STRANGE` has more.
KINDS = [None, -1, "x", [], ["x"], {}, {"x": 1}]
JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5) | STRANGE,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=4), inner),
    max_leaves=5,
)
KNOWN = ("model", "max_tokens")  # without which nothing else is looked at
ERROR = re.compile(r'"error": ?[{"]')  # of a stream that fails after its first token
# Statuses of a client's mistakes and of conditions that a client can meet.
REFUSED = {400, 403, 404, 405, 408, 413, 429, 503}


class Server:
    """The ingress in front of a replica that answers everything, on an event loop of its own."""

    def __init__(self, runner: asyncio.Runner, client: httpx.AsyncClient) -> None:
        self._runner = runner
        self._client = client

    def check(self, operation: Operation, content: bytes) -> None:
        path, method = path_of(operation), operation.method
        response = self._runner.run(self._client.request(method, path, content=content))
        assert response.status_code == 200 or response.status_code in REFUSED, response.text
        if response.status_code != 200:
            check_error(operation.protocol, response.text)
        else:
            assert not ERROR.search(response.text)


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    with asyncio.Runner(loop_factory=PatientLoop) as runner:
        stack = AsyncExitStack()
        made = http_client(AnyReplica(), **willing(), max_body_bytes=1 << 20)
        client = runner.run(stack.enter_async_context(made))
        yield Server(runner, client)
        runner.run(stack.aclose())


def encoded(value: Any) -> bytes:
    """As JSON; lone surrogates become escapes, infinities and NaN names."""
    return json.dumps(value).encode()


@pytest.mark.parametrize("operation", with_bodies(), ids=name_of)
def test_bodies_that_follow_the_schema(operation: Operation, server: Server):
    known = {name: value for name, value in body_of(operation).items() if name in KNOWN}

    @FEW
    @given(following(schema_of(operation)))
    def check(body: dict[str, Any]) -> None:
        server.check(operation, encoded(body | known))

    check()


@pytest.mark.parametrize("operation", with_bodies(), ids=name_of)
def test_valid_bodies_with_any_one_part_of_another_kind(operation: Operation, server: Server):
    valid = body_of(operation)
    for place, _ in values_of(valid):
        for value in KINDS:
            server.check(operation, encoded(replaced(valid, place, value)))


@pytest.mark.parametrize("operation", with_bodies(), ids=name_of)
def test_valid_bodies_with_some_parts_replaced(operation: Operation, server: Server):
    valid = body_of(operation)
    changes = st.dictionaries(
        st.sampled_from([place for place, _ in values_of(valid)]), JSON, max_size=3
    )

    @FEW
    @given(st.booleans(), changes)
    def check(stream: bool, changed: dict[Place, Any]) -> None:
        body: Any = valid | {"stream": stream}
        for place, value in changed.items():
            body = replaced(body, place, value)
        server.check(operation, encoded(body))

    check()


@pytest.mark.parametrize("operation", with_bodies(), ids=name_of)
def test_bodies_that_are_not_json_objects(operation: Operation, server: Server):
    valid = encoded(body_of(operation))

    @FEW
    @given(st.binary() | JSON.map(encoded) | st.integers(0, len(valid)).map(lambda n: valid[:n]))
    @example(b"[" * 100_000)
    @example(b'{"a":' * 2000)
    @example(b"\xef\xbb\xbf{}")
    @example(b'{"model": "\\ud800"}')
    def check(content: bytes) -> None:
        server.check(operation, content)

    check()


def following(schema: dict[str, Any]) -> st.SearchStrategy[Any]:
    """Values that satisfy a schema of the document, with few of an object's fields."""
    if "$ref" in schema:
        name = schema["$ref"].removeprefix("#/components/schemas/")
        return st.deferred(lambda: following(DOCUMENT["components"]["schemas"][name]))
    if "anyOf" in schema:
        return st.one_of(map(following, schema["anyOf"]))
    if "enum" in schema:
        return st.sampled_from(schema["enum"])
    kinds = schema.get("type", "any")
    return st.one_of(
        _of_type(kind, schema) for kind in ([kinds] if isinstance(kinds, str) else kinds)
    )


def _of_type(kind: str, schema: dict[str, Any]) -> st.SearchStrategy[Any]:
    low, high = schema.get("minimum", schema.get("exclusiveMinimum")), schema.get("maximum")
    match kind:
        case "null":
            return st.none()
        case "boolean":
            return st.booleans()
        case "integer":
            return st.integers(low, high)
        case "number":
            above = "exclusiveMinimum" in schema
            return st.floats(low, high, exclude_min=above, allow_nan=False, allow_infinity=False)
        case "string":
            pattern = schema.get("pattern")
            return st.text() if pattern is None else st.from_regex(pattern)
        case "array":
            return st.lists(following(schema.get("items", {})), max_size=3)
        case "object":
            return _objects(schema)
    return JSON


def _objects(schema: dict[str, Any]) -> st.SearchStrategy[dict[str, Any]]:
    fields = {name: following(field) for name, field in schema.get("properties", {}).items()}
    if not fields:
        return st.dictionaries(st.text(max_size=4), JSON, max_size=3)
    needed = set(schema.get("required", ()))
    chosen = st.lists(st.sampled_from(sorted(fields)), max_size=5).map(needed.union)
    return chosen.flatmap(lambda some: st.fixed_dictionaries({n: fields[n] for n in sorted(some)}))
