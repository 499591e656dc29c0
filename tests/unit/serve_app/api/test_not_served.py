"""The tables of fields and paths that are not served, against the types and official clients."""

import re
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any, get_args, get_type_hints

import httpx
import pytest
from anthropic.types import ContentBlockParam
from openai.types.chat import ChatCompletionContentPartParam

from serve_app.api.openapi import NOT_SERVED
from serve_app.api.openapi_operations import OPERATIONS, Protocol
from tests.checkout import ROOT
from tests.unit.serve_app.api.operations import (
    DOCUMENT,
    AnyReplica,
    body_of,
    schema_of,
    willing,
    with_bodies,
)
from tests.unit.serve_app.fake_replicas import http_client

SECTION = "What is not served"
QUOTED = re.compile(r"`([^`]+)`")
PROTOCOLS = pytest.mark.parametrize("protocol", Protocol)
# The types of content that official clients send.
CONTENT: dict[str, Any] = {
    "/v1/chat/completions": ChatCompletionContentPartParam,
    "/v1/messages": ContentBlockParam,
    "/v1/messages/count_tokens": ContentBlockParam,
}
# The package and the files of each official client, and how paths look in them.
CLIENTS = {
    Protocol.OLLAMA: ("ollama", "_client.py", r"'(/(?:api|v1)/[^'?]+)", ""),
    Protocol.OPENAI: ("openai", "resources/**/*.py", r'"(?:/v1)?(/[a-z_{}/]+)[?"]', "/v1"),
    Protocol.ANTHROPIC: ("anthropic", "resources/**/*.py", r'"(/v1/[^"?]+)', ""),
}


def rows(protocol: Protocol) -> list[tuple[list[str], list[str], str]]:
    """Endpoints, fields and reason of each row of the protocol's table."""
    _, _, text = (ROOT / "docs" / "protocols.md").read_text().partition(f"## {SECTION}\n")
    _, _, text = text.partition(f"### {protocol}'s protocol")
    lines = re.split(r"\n#", text)[0].splitlines()
    cells = [line.strip("|").split("|") for line in lines if line.startswith("| `")]
    return [(QUOTED.findall(a), QUOTED.findall(b), reason.strip()) for a, b, reason in cells]


def listed_paths(protocol: Protocol) -> list[str]:
    return [path for paths, fields, _ in rows(protocol) if not fields for path in paths]


def without_names(path: str) -> str:
    """The path without the names of its parameters."""
    return re.sub(r"\{[^}]*\}", "{}", path)


def listed_fields(protocol: Protocol) -> Iterator[tuple[str, str]]:
    for paths, fields, _ in rows(protocol):
        yield from ((path, field) for path in paths for field in fields)


def unserved_in(schema: dict[str, Any], place: str = "") -> Iterator[str]:
    """The places of the fields that a schema and those it refers to mark as not served."""
    if "$ref" in schema:
        name = schema["$ref"].removeprefix("#/components/schemas/")
        schema = DOCUMENT["components"]["schemas"][name]
    if schema.get("description") == NOT_SERVED:
        yield place
    for each in schema.get("anyOf", ()):
        yield from unserved_in(each, place)
    if "items" in schema:
        yield from unserved_in(schema["items"], f"{place}[]")
    for name, field in schema.get("properties", {}).items():
        yield from unserved_in(field, f"{place}.{name}" if place else name)


async def refused_content(client: httpx.AsyncClient, path: str) -> list[str]:
    kinds = {
        kind for part in get_args(CONTENT[path]) for kind in get_args(get_type_hints(part)["type"])
    }
    refused = []
    for kind in kinds:
        for role in ("user", "assistant"):
            messages = [
                {"role": role, "content": [{"type": kind}]},
                {"role": "user", "content": "x"},
            ]
            body = {"model": "demo", "max_tokens": 1, "messages": messages}
            reason = (await client.post(path, json=body)).text
            if f'is of type \\"{kind}\\"' not in reason:
                break
        else:
            refused.append(f"{{type: {kind}}}")
    return refused


@PROTOCOLS
async def test_the_table_lists_exactly_the_fields_that_are_not_served(protocol: Protocol):
    listed = set(listed_fields(protocol))
    expected = set()
    async with http_client(AnyReplica()) as client:
        for operation in with_bodies():
            if operation.protocol is protocol:
                found = [*unserved_in(schema_of(operation))]
                if operation.path in CONTENT:
                    found += await refused_content(client, operation.path)
                expected |= {(operation.path, field) for field in found}
    where = f"docs/protocols.md, '{SECTION}', table of {protocol}"
    assert not expected - listed, f"{where}: add {sorted(expected - listed)}"
    assert not listed - expected, f"{where}: remove {sorted(listed - expected)}"


@PROTOCOLS
def test_the_table_lists_the_paths_of_the_official_client_that_are_not_served(protocol: Protocol):
    package, files, pattern, prefix = CLIENTS[protocol]
    spec = find_spec(package)
    assert spec is not None and spec.origin is not None
    sources = [path.read_text() for path in Path(spec.origin).parent.glob(files)]
    called = {prefix + path for text in sources for path in re.findall(pattern, text)}
    assert called
    served = {without_names(operation.path) for operation in OPERATIONS}
    begins = tuple(f"{without_names(path)}/" for path in listed_paths(protocol))
    missing = {
        path
        for path in called
        if without_names(path) not in served and not f"{without_names(path)}/".startswith(begins)
    }
    assert not missing, (
        f"docs/protocols.md, '{SECTION}', table of {protocol}: add {sorted(missing)}"
    )


@PROTOCOLS
async def test_every_path_in_the_table_is_refused_and_has_a_reason(protocol: Protocol):
    assert all(reason for *_, reason in rows(protocol))
    async with http_client(AnyReplica(), **willing()) as client:
        for path in listed_paths(protocol):
            response = await client.post(path, json={"model": "demo"})
            assert response.status_code in (403, 404, 405), (
                f"{path} is served; remove it from the table"
            )


@PROTOCOLS
async def test_the_fields_in_the_table_are_refused_by_name(protocol: Protocol):
    bodies = {each.path: (each.method, body_of(each)) for each in with_bodies()}
    async with http_client(AnyReplica(), **willing()) as client:
        for path, field in listed_fields(protocol):
            if "[" in field or "{" in field:
                continue
            method, body = bodies[path]
            outer, _, inner = field.rpartition(".")
            value = {inner: {"x": [1.5]}}
            changed = {outer: body.get(outer, {}) | value} if outer else value
            response = await client.request(method, path, json=body | changed)
            assert response.status_code == 400, (path, field)
            assert f'{inner}\\" is not served yet' in response.text
