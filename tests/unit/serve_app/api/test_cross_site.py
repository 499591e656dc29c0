"""Web pages as clients: allowed origins and host names, DNS rebinding, preflights."""

import json
import socket

import pytest

from runtime.errors import OverloadedError
from serve_app.api.cross_site import LONGEST_NAME, MOST_LOGGED
from tests.unit.serve_app.api.api_keys import api_key
from tests.unit.serve_app.fake_replicas import PretendReplica, http_client

MESSAGES = [{"role": "user", "content": "Hi"}]
CHAT = {"model": "demo", "messages": MESSAGES}
LOCAL = "http://localhost:3000"
FOREIGN = "https://elsewhere.test"
ALLOW = "access-control-allow-origin"
# Browsers send these without asking first, as any page may.
SIMPLE = {"content-type": "text/plain"}


def preflight(origin: str, **more: str) -> dict[str, str]:
    return {
        "origin": origin,
        "access-control-request-method": "POST",
        "access-control-request-headers": "authorization,content-type,x-stainless-os",
        **more,
    }


@pytest.mark.parametrize(
    "origin",
    [
        LOCAL,
        "http://localhost",
        "https://localhost:8443",
        "http://127.0.0.1:5173",
        "http://0.0.0.0:8080",
        "http://[::1]:3000",
        "http://tauri.localhost",
        "app://obsidian.md",
        "file://",
        "tauri://localhost",
        "vscode-webview://1abc",
        "vscode-file://vscode-app",
    ],
)
async def test_local_pages_and_applications_may_send_requests_and_read_replies(origin):
    async with http_client(PretendReplica()) as client:
        asked = await client.options("/v1/chat/completions", headers=preflight(origin))
        assert asked.status_code == 200
        assert asked.headers[ALLOW] == origin
        assert "POST" in asked.headers["access-control-allow-methods"]
        allowed = asked.headers["access-control-allow-headers"]
        assert {"authorization", "content-type", "x-stainless-os"} <= set(allowed.split(","))
        answer = await client.post("/api/chat", json=CHAT, headers={"origin": origin})
        assert answer.status_code == 200
        assert answer.headers[ALLOW] == origin
        assert "Origin" in answer.headers["vary"]


@pytest.mark.parametrize(
    "origin",
    [
        FOREIGN,
        "null",
        "",
        "http://localhost.elsewhere.test",
        "http://localhost:3000.elsewhere.test",
        "http://localhost@elsewhere.test",
        "http://elsewhere.test#localhost",
        "http://127.0.0.10.elsewhere.test",
        "http://xlocalhost",
        "ftp://localhost",
        "chrome-extension://abc",
        "http://[",
    ],
)
@pytest.mark.parametrize("path", ["/api/chat", "/api/generate", "/v1/chat/completions"])
async def test_foreign_pages_are_refused_before_the_request_is_processed(origin, path):
    replica = PretendReplica()
    async with http_client(replica) as client:
        headers = {"origin": origin, **SIMPLE}
        answer = await client.post(path, json={**CHAT, "prompt": "x"}, headers=headers)
        assert answer.status_code == 403
        assert "allowed_origins" in str(answer.json()["error"])
        assert ALLOW not in answer.headers
        asked = await client.options(path, headers=preflight(origin))
        assert asked.status_code == 400  # a preflight is refused without a body for clients
        assert ALLOW not in asked.headers
    assert replica.tasks == []


@pytest.mark.parametrize(
    "path", ["/", "/api/version", "/api/tags", "/api/ps", "/v1/models", "/v1/models/demo"]
)
async def test_every_route_refuses_foreign_origins_and_hosts(path):
    async with http_client(PretendReplica()) as client:
        assert (await client.get(path)).status_code == 200
        for headers in ({"origin": FOREIGN}, {"host": "elsewhere.test"}):
            assert (await client.get(path, headers=headers)).status_code == 403


@pytest.mark.parametrize(
    ("configured", "origin", "allowed"),
    [
        ("https://chat.example.org", "https://chat.example.org", True),
        ("https://chat.example.org", "http://chat.example.org", False),
        ("https://chat.example.org", "https://chat.example.org:8443", False),
        ("https://chat.example.org", "https://chatxexample.org", False),
        ("https://chat.example.org:8443", "https://chat.example.org:8443", True),
        ("https://chat.example.org:*", "https://chat.example.org:8443", True),
        ("https://chat.example.org:*", "https://chat.example.org", True),
        ("https://*.Example.org", "https://a.b.example.org", True),
        ("https://*.example.org", "https://example.org", False),
        ("https://*.example.org", "https://elsewhere.test/.example.org", False),
        ("http://192.168.1.5:*", "http://192.168.1.5:3000", True),
        ("http://[fd00::1]:3000", "http://[fd00::1]:3000", True),
        ("chrome-extension://*", "chrome-extension://abc", True),
        ("chrome-extension://abc", "chrome-extension://abd", False),
        ("*", FOREIGN, True),
        ("*", "null", True),
    ],
)
async def test_further_origins_are_configured(configured, origin, allowed):
    async with http_client(PretendReplica(), allowed_origins=(configured,)) as client:
        for each, status in ((origin, 200 if allowed else 403), (LOCAL, 200)):
            answer = await client.post("/api/chat", json=CHAT, headers={"origin": each})
            assert answer.status_code == status
            assert answer.headers.get(ALLOW) == (each if status == 200 else None)


async def test_preflights_carry_no_key_and_need_none():
    async with http_client(PretendReplica(), api_keys=(api_key("secret"),)) as client:
        asked = await client.options("/v1/chat/completions", headers=preflight(LOCAL))
        assert asked.status_code == 200 and asked.headers[ALLOW] == LOCAL
        answer = await client.post("/v1/chat/completions", json=CHAT, headers={"origin": LOCAL})
        assert answer.status_code == 401 and answer.headers[ALLOW] == LOCAL
        key = {"authorization": "Bearer secret"}
        for origin, reported in ((LOCAL, LOCAL), (FOREIGN, None)):
            headers = {"origin": origin, "host": "llm.example.org", **key}
            answer = await client.post("/v1/chat/completions", json=CHAT, headers=headers)
            assert answer.status_code == 200, "a key is proof enough"
            assert answer.headers.get(ALLOW) == reported
        asked = await client.options("/v1/chat/completions", headers=preflight(FOREIGN))
        assert asked.status_code == 400 and ALLOW not in asked.headers


async def test_a_preflight_from_a_public_page_into_a_private_network_is_answered():
    private = preflight(LOCAL, **{"access-control-request-private-network": "true"})
    async with http_client(PretendReplica()) as client:
        asked = await client.options("/api/chat", headers=private)
        assert asked.headers["access-control-allow-private-network"] == "true"


async def test_pages_can_read_errors_of_every_kind(monkeypatch):
    replica = PretendReplica()
    async with http_client(replica) as client:

        async def status(method: str, path: str, **request) -> int:
            answer = await client.request(method, path, headers={"origin": LOCAL}, **request)
            assert answer.headers[ALLOW] == LOCAL
            return answer.status_code

        assert await status("POST", "/api/chat", content=b"{") == 400
        assert await status("POST", "/api/chat", json={"model": "x"}) == 404
        assert await status("GET", "/unheard") == 404
        assert await status("GET", "/api/chat") == 405
        replica.error = OverloadedError("full")
        answer = await client.post("/api/chat", json=CHAT, headers={"origin": LOCAL})
        assert answer.status_code == 503 and "retry-after" in answer.headers
        exposed = answer.headers["access-control-expose-headers"].split(", ")
        assert {"Retry-After", "x-ratelimit-remaining-tokens"} <= set(exposed)
        assert {"x-request-id", "request-id"} <= set(exposed)
        monkeypatch.setattr("serve_app.api.fields.BodyReader.read", lambda *_: 1 / 0)
        assert await status("POST", "/api/chat", json=CHAT) == 500


async def test_streams_may_be_read_by_pages():
    async with http_client(PretendReplica()) as client:
        for path in ("/api/chat", "/v1/chat/completions"):
            body = {**CHAT, "stream": True}
            answer = await client.post(path, json=body, headers={"origin": LOCAL})
            assert answer.headers[ALLOW] == LOCAL
            assert "world" in answer.text


@pytest.mark.parametrize(
    ("host", "allowed"),
    [
        ("localhost:8000", True),
        ("LOCALHOST", True),
        ("localhost.", True),
        ("127.0.0.1:8000", True),
        ("[::1]:8000", True),
        ("[::1]", True),
        ("192.168.1.7:8000", True),
        ("203.0.113.9", True),
        ("caravan", True),
        ("caravan:80", True),
        ("caravan.default.svc.cluster.local", True),
        ("box.local:8000", True),
        ("host.docker.internal:8000", True),
        ("box.home.arpa", True),
        ("node.lan:8000", True),
        ("NODE.lan.", True),
        ("nas.home", True),
        ("box.localdomain", True),
        ("caravan.default.svc", True),
        ("", True),
        ("elsewhere.test", False),
        ("elsewhere.test:8000", False),
        ("localhost.elsewhere.test", False),
        ("127.0.0.1.elsewhere.test:8000", False),
        ("notlocal", True),
        ("evil.notlocal", False),
        ("evil.notlan", False),
        ("node.lan.elsewhere.test", False),
        ("caravan.default.svc.elsewhere.test", False),
        ("[::1].elsewhere.test", False),
        ("elsewhere.test@127.0.0.1", False),
        ("127.0.0.1/elsewhere.test", False),
        ("elsewhere.test:80:80", False),
        ("[e]", False),
        ("[", False),
    ],
)
async def test_without_keys_a_public_host_name_is_refused(host, allowed):
    replica = PretendReplica()
    async with http_client(replica) as client:
        # After DNS rebinding, browsers treat the page as one of the same origin.
        for headers in ({"host": host}, {"host": host, "origin": f"http://{host}"}):
            answer = await client.post("/api/chat", json=CHAT, headers=headers)
            assert answer.status_code == (200 if allowed else 403)
    assert bool(replica.tasks) == allowed


async def test_further_names_of_the_server_are_configured():
    hosts = ("llm.example.org", "*.internal.example.org")
    async with http_client(PretendReplica(), allowed_hosts=hosts) as client:
        for host, status in [
            ("llm.example.org", 200),
            ("LLM.Example.org:8000", 200),
            ("a.b.internal.example.org", 200),
            ("internal.example.org", 403),
            ("example.org", 403),
            ("localhost", 200),
        ]:
            assert (await client.get("/api/tags", headers={"host": host})).status_code == status
        refused = await client.get("/api/tags", headers={"host": "example.org"})
        assert "'example.org'" in refused.json()["error"]
        assert "allowed_hosts" in refused.json()["error"]
    async with http_client(PretendReplica(), allowed_hosts=("*",)) as client:
        assert (await client.get("/api/tags", headers={"host": "a.test"})).status_code == 200


async def test_the_host_name_of_the_process_needs_allowed_hosts_like_any_other(monkeypatch):
    monkeypatch.setattr(socket, "gethostname", lambda: "Box.example.org")
    for hosts, status in ((None, 403), (("box.example.org",), 200)):
        async with http_client(PretendReplica(), allowed_hosts=hosts) as client:
            headers = {"host": "box.example.org:8000"}
            assert (await client.get("/api/tags", headers=headers)).status_code == status


async def hosts_logged(capsys, hosts: list[str]) -> list[dict[str, str]]:
    """The lines that requests under each of `hosts`, all refused, leave in the log."""
    capsys.readouterr()
    async with http_client(PretendReplica()) as client:
        for host in hosts:
            refused = await client.get("/api/tags", headers={"host": host})
            assert refused.status_code == 403
    return [json.loads(line) for line in capsys.readouterr().err.splitlines()]


async def test_each_refused_host_name_is_logged_once_with_the_remedy(capsys):
    hosts = ["llm.example.org", "LLM.example.org:8000", "a@b.test", "a@b.test"]
    lines = await hosts_logged(capsys, hosts)
    assert [line["host"] for line in lines] == ["llm.example.org", "a@b.test"]
    for line in lines:
        assert line["level"] == "warning" and "`allowed_hosts`" in line["remedy"]


async def test_refused_host_names_cannot_fill_the_log(capsys):
    names = [f"{'x' * 2 * LONGEST_NAME}.test"]
    names += [f"n{index}.test" for index in range(MOST_LOGGED + 5)]
    lines = await hosts_logged(capsys, names)
    assert len(lines) == MOST_LOGGED
    assert max(len(line["host"]) for line in lines) == LONGEST_NAME


async def test_with_keys_names_are_checked_only_where_some_are_configured():
    key = {"authorization": "Bearer secret"}
    for hosts, status in ((None, 200), ((), 403), (("a.test",), 200)):
        async with http_client(
            PretendReplica(), api_keys=(api_key("secret"),), allowed_hosts=hosts
        ) as client:
            answer = await client.get("/api/tags", headers={"host": "a.test", **key})
            assert answer.status_code == status


async def test_an_allowed_page_can_read_that_the_name_is_wrong():
    async with http_client(PretendReplica()) as client:
        headers = {"host": "llm.example.org", "origin": LOCAL}
        answer = await client.post("/v1/chat/completions", json=CHAT, headers=headers)
        assert answer.status_code == 403 and answer.headers[ALLOW] == LOCAL
        assert "allowed_hosts" in answer.json()["error"]["message"]


async def test_a_page_of_the_servers_own_origin_may_send_requests():
    async with http_client(PretendReplica(), allowed_hosts=("llm.example.org",)) as client:
        headers = {"host": "llm.example.org", "origin": "https://llm.example.org"}
        assert (await client.post("/api/chat", json=CHAT, headers=headers)).status_code == 200


async def test_health_is_reported_under_any_host_name():
    async with http_client(PretendReplica()) as client:
        assert (await client.get("/healthz", headers={"host": "lb.test"})).status_code == 200
