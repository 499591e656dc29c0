"""Through Serve's HAProxy: HTTP/1.0, web pages and names of the server."""

import json
import socket
from urllib.parse import urlsplit

import httpx
import pytest

from tests.patience import HANG_S
from tests.serve.application import Application

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


def test_local_pages_may_ask_and_foreign_ones_may_not(application: Application):
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
