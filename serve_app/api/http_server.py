"""Settings that Ray Serve does not pass to uvicorn, the server of each ingress replica."""

import ctypes
from collections.abc import MutableMapping

import uvicorn.config
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

# HAProxy accepts 16 KiB, so only requests that bypass it can reach this limit.
MAX_HEAD_BYTES = 64 * 1024
# By default glibc raises its mmap threshold to the largest freed allocation, up to 32 MiB, and
# keeps smaller allocations: a few large bodies would leave the process hundreds of megabytes
# larger.
MMAP_BYTES = 2**20
_M_MMAP_THRESHOLD = -3


class LimitedProtocol(HttpToolsProtocol):
    """Refuses more than `MAX_HEAD_BYTES` plus one read without a part of a body: the head of a
    request, fields after its body, or extensions of a chunk. uvicorn has no limit, and its cost
    grows with the square of a header's length. Fields after a body are discarded.
    """

    _in_head = False
    _advanced = False  # whether the last read ended a head or had a part of a body
    _field_bytes = 0

    def data_received(self, data: bytes) -> None:
        self._advanced = False
        super().data_received(data)
        self._field_bytes = 0 if self._advanced else self._field_bytes + len(data)
        if self._field_bytes > MAX_HEAD_BYTES:
            message = f"The request's headers have more than {MAX_HEAD_BYTES:,} bytes."
            self.send_400_response(message)

    def on_message_begin(self) -> None:
        super().on_message_begin()
        self._in_head = self._advanced = True

    def on_header(self, name: bytes, value: bytes) -> None:
        if self._in_head:
            super().on_header(name, value)

    def on_headers_complete(self) -> None:
        self._in_head, self._advanced = False, True
        super().on_headers_complete()

    def on_body(self, body: bytes) -> None:
        self._advanced = True
        super().on_body(body)

    def on_message_complete(self) -> None:
        self._advanced = True
        super().on_message_complete()


def configure(environment: MutableMapping[str, str]) -> None:
    """Must be called before Ray starts the server, because Ray passes neither setting to uvicorn.

    By default uvicorn takes the client's address from `X-Forwarded-For` if the peer is on loopback,
    as HAProxy is, and any client can send that header through HAProxy.
    """
    uvicorn.config.HTTP_PROTOCOLS["auto"] = f"{__name__}:{LimitedProtocol.__name__}"
    environment.setdefault("FORWARDED_ALLOW_IPS", "")


def return_large_allocations() -> None:
    """Makes glibc return allocations of more than `MMAP_BYTES` to the system when they are freed.
    Has no effect with other C libraries.
    """
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is not None:
        mallopt(_M_MMAP_THRESHOLD, MMAP_BYTES)
