from starlette.applications import Starlette
from starlette.middleware import Middleware
from starlette.requests import Request
from starlette.responses import PlainTextResponse
from starlette.routing import Route
from starlette.testclient import TestClient

from serve_app.api.auth import RequireKey
from serve_app.api.request_checks import CheckRequests
from serve_app.api.tenant import (
    UNKNOWN,
    client_address,
    tenant_by_address,
    tenant_id,
    tenant_of,
)
from tests.unit.serve_app.api.api_keys import api_key

BY_ADDRESS = Middleware(CheckRequests, checks=[tenant_by_address])


async def tenant(request: Request) -> PlainTextResponse:
    return PlainTextResponse(tenant_of(request))


def test_without_keys_the_tenant_is_the_client_address() -> None:
    app = Starlette(
        routes=[Route("/", tenant)],
        middleware=[BY_ADDRESS],
    )
    assert TestClient(app, client=("192.0.2.7", 1234)).get("/").text == "192.0.2.7"
    assert TestClient(app, client=("192.0.2.8", 1234)).get("/").text == "192.0.2.8"


def test_with_keys_each_key_is_a_tenant() -> None:
    app = Starlette(
        routes=[Route("/x", tenant)],
        middleware=[
            Middleware(CheckRequests, checks=[RequireKey([api_key("one"), api_key("two")])])
        ],
    )
    client = TestClient(app)
    reported = [
        client.get("/x", headers={"authorization": f"Bearer {key}"}).text for key in ("one", "two")
    ]
    assert reported == ["one", "two"]


def test_a_connection_without_an_address_has_the_shared_tenant() -> None:
    assert client_address({"type": "http", "client": None}) == UNKNOWN


def test_tasks_carry_a_digest_of_the_tenant_without_its_address() -> None:
    def shown(address: str) -> str:
        app = Starlette(
            routes=[Route("/", identified)],
            middleware=[BY_ADDRESS],
        )
        return TestClient(app, client=(address, 1234)).get("/").text

    async def identified(request: Request) -> PlainTextResponse:
        return PlainTextResponse(tenant_id(request))

    first, second = shown("192.0.2.7"), shown("192.0.2.8")
    assert first == shown("192.0.2.7") != second
    assert len(first) == 32 and "192.0" not in first


def test_an_ipv6_network_is_one_tenant() -> None:
    scopes = [
        {"type": "http", "client": (address, 1)} for address in ("2001:db8::1", "2001:db8::2")
    ]
    assert {client_address(scope) for scope in scopes} == {"2001:db8::/64"}


def test_an_ipv4_address_is_the_same_tenant_in_its_ipv6_form() -> None:
    assert client_address({"type": "http", "client": ("::ffff:192.0.2.7", 1)}) == "192.0.2.7"
