"""HTTP servers on loopback that stand in for model registries."""

import hashlib
import json
import re
import secrets
import socket
import ssl
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from unittest import mock
from urllib.parse import parse_qs, unquote, urlsplit

import httpx

from model_zoo.sources import http
from tests.patience import HANG_S

PIECE = 16 << 10


def free_port() -> int:
    """A port of 127.0.0.1 on which nothing listens. It is none of those that the kernel chooses,
    many of which Ray's and other processes could get before it is used."""
    while True:
        port = 20_000 + secrets.randbelow(10_000)
        with suppress(OSError), socket.create_server(("127.0.0.1", port)):
            return port


def digest(data: bytes) -> str:
    return f"sha256:{hashlib.sha256(data).hexdigest()}"


@dataclass
class Exchange:
    """A request and methods to reply to it; `sent` counts the bytes of its body."""

    handler: BaseHTTPRequestHandler
    path: str
    query: dict[str, list[str]]
    headers: Mapping[str, str]
    sent: int = 0

    @property
    def method(self) -> str:
        return self.handler.command

    def body(self) -> Iterator[bytes]:
        """The body in pieces; ends early if the client does."""
        left = int(self.headers.get("content-length", "0"))
        while left and (piece := self.handler.rfile.read(min(left, PIECE))):
            left -= len(piece)
            yield piece

    def answer(self, body: bytes = b"", *, status: int = 200, **headers: str) -> None:
        self.begin(status, {"content-length": str(len(body)), **headers})
        self.send(body)

    def json(self, value: object, *, status: int = 200, **headers: str) -> None:
        kind = {"content-type": "application/json"}
        self.answer(json.dumps(value).encode(), status=status, **kind, **headers)

    def redirect(self, target: str, *, status: int = 302) -> None:
        self.answer(status=status, location=target)

    def begin(self, status: int, headers: Mapping[str, str]) -> None:
        self.handler.send_response(status)
        for name, value in headers.items():
            self.handler.send_header(name.replace("_", "-"), value)
        self.handler.end_headers()

    def send(self, data: bytes) -> None:
        if self.method == "HEAD":
            return
        for at in range(0, len(data), PIECE):
            self.handler.wfile.write(data[at : at + PIECE])
            self.sent += len(data[at : at + PIECE])

    def range_of(self, data: bytes) -> tuple[int, int]:
        stated = re.fullmatch(r"bytes=(\d+)-(\d+)", self.headers.get("range", ""))
        return (int(stated[1]), int(stated[2]) + 1) if stated else (0, len(data))

    def content(self, data: bytes) -> None:
        """The data, or the requested range of it."""
        begin, end = self.range_of(data)
        headers = {"content-length": str(end - begin), "accept-ranges": "bytes"}
        if "range" in self.headers:
            headers["content-range"] = f"bytes {begin}-{end - 1}/{len(data)}"
        self.begin(206 if "range" in self.headers else 200, headers)
        self.send(data[begin:end])


Answering = Callable[[Exchange], None]


@dataclass
class Server:
    """A running server; `exchanges` in the order in which they began."""

    port: int
    exchanges: list[Exchange] = field(default_factory=list)

    @property
    def host(self) -> str:
        return f"127.0.0.1:{self.port}"

    @property
    def url(self) -> str:
        return f"http://{self.host}"

    def sent(self, part_of_path: str) -> int:
        """Bytes of bodies that were sent for paths that have this in them."""
        return sum(exchange.sent for exchange in self.exchanges if part_of_path in exchange.path)


@contextmanager
def serving(answering: Answering, *, tls: ssl.SSLContext | None = None) -> Iterator[Server]:
    """A server; clients in this process wait for it as long as a busy machine needs."""

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"
        disable_nagle_algorithm = True

        def do_GET(self) -> None:
            split = urlsplit(self.path)
            headers = {name.lower(): value for name, value in self.headers.items()}
            exchange = Exchange(self, unquote(split.path), parse_qs(split.query), headers)
            server.exchanges.append(exchange)
            try:
                answering(exchange)
            except ConnectionError:  # the client has left
                self.close_connection = True

        do_HEAD = do_POST = do_PATCH = do_PUT = do_GET

        def log_message(self, *_: object) -> None:
            pass

    listening = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    listening.daemon_threads = True
    if tls is not None:
        listening.socket = tls.wrap_socket(listening.socket, server_side=True)
    server = Server(listening.server_port)
    thread = threading.Thread(target=listening.serve_forever, kwargs={"poll_interval": 0.02})
    thread.start()
    try:
        with mock.patch.object(http, "TIMEOUT", httpx.Timeout(HANG_S)):
            yield server
    finally:
        listening.shutdown()
        listening.server_close()
        thread.join()
