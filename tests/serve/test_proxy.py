"""Through Serve's HAProxy and directly: HTTP/1.0, web pages, host names, large heads."""

import json
import socket
from pathlib import Path
from urllib.parse import urlsplit

import httpx
import pytest

from tests.patience import HANG_S
from tests.serve.application import POLL_S, Application, call_replicas, eventually

QUESTION = {"model": "demo", "messages": [{"role": "user", "content": "What is 2 + 3?"}]}
PAGE = "http://localhost:3000"


def raw(application: Application, version: str, body: dict, *headers: str) -> bytes:
    """Everything until the connection is closed."""
    address = urlsplit(application.url)
    data = json.dumps(body).encode()
    lines = [f"POST /api/chat HTTP/{version}", f"Content-Length: {len(data)}", *headers, "", ""]
    with socket.create_connection((address.hostname, address.port), timeout=HANG_S) as connection:
        connection.sendall("\r\n".join(lines).encode() + data)
        return b"".join(iter(lambda: connection.recv(65536), b""))


@pytest.mark.parametrize("stream", [True, False])
def test_a_client_of_http_1_0_gets_no_chunks(application: Application, stream):
    reply = raw(application, "1.0", {**QUESTION, "stream": stream})
    head, _, body = reply.partition(b"\r\n\r\n")
    headers = dict(line.lower().split(b": ", 1) for line in head.split(b"\r\n")[1:])
    assert b"transfer-encoding" not in headers
    assert int(headers[b"content-length"]) == len(body)
    assert json.loads(body.splitlines()[-1])["done"]


def test_a_client_of_http_1_1_gets_a_stream_in_chunks(application: Application):
    reply = raw(application, "1.1", QUESTION, "Host: localhost", "Connection: close")
    assert b"transfer-encoding: chunked" in reply.partition(b"\r\n\r\n")[0].lower()


def test_local_web_pages_are_allowed_and_foreign_ones_are_not(application: Application):
    url = f"{application.url}/api/chat"
    asked = httpx.options(
        url, headers={"origin": PAGE, "access-control-request-method": "POST"}, timeout=HANG_S
    )
    assert asked.headers["access-control-allow-origin"] == PAGE
    with httpx.stream(
        "POST", url, json=QUESTION, headers={"origin": PAGE}, timeout=HANG_S
    ) as answer:
        assert answer.headers["access-control-allow-origin"] == PAGE
        assert json.loads(list(answer.iter_lines())[-1])["done"]
    for headers in ({"origin": "https://elsewhere.test"}, {"host": "elsewhere.test"}):
        assert httpx.post(url, json=QUESTION, headers=headers, timeout=HANG_S).status_code == 403


def ingress_ports() -> list[int]:
    """Ports of the ingress replicas; like the proxy they listen on loopback only."""
    rows = [line.split() for line in Path("/proc/net/tcp").read_text().splitlines()[1:]]
    listening = [row[1].split(":") for row in rows if row[3] == "0A"]
    found = {int(port, 16): address for address, port in listening}
    ports = [port for port in found if 30_000 <= port < 31_000]
    assert {found[port] for port in ports} == {"0100007F"}
    return ports


def test_the_ingress_takes_requests_from_haproxy_only(application: Application):
    assert httpx.get(f"{application.url}/v1/models", timeout=HANG_S).status_code == 200
    for port in ingress_ports():
        for path in ("/v1/models", "/healthz"):
            direct = httpx.get(f"http://127.0.0.1:{port}{path}", timeout=HANG_S)
            assert direct.status_code == 403, direct.text


def test_the_server_is_ready_after_its_model_has_started(application: Application):
    eventually(lambda: httpx.get(f"{application.url}/readyz", timeout=POLL_S).status_code == 200)
    assert call_replicas("is_ready", deployment="Ingress") == [True], "as the next ingress will ask"


def test_the_head_of_a_request_is_limited_without_haproxy(application: Application):
    for port in (urlsplit(application.url).port, *ingress_ports()):
        with socket.create_connection(("127.0.0.1", port), timeout=HANG_S) as connection:
            try:
                connection.sendall(b"GET / HTTP/1.1\r\nX-Long: " + b"a" * 2**23)
                reply = connection.recv(12)
            except ConnectionError:  # closed while the rest was sent
                continue
            assert reply == b"HTTP/1.1 400"
