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
    """Refuses request heads of more than `MAX_HEAD_BYTES` plus one read. uvicorn has no limit, and
    its cost grows with the square of a header's length.
    """

    _in_head = False
    _head_bytes = 0

    def data_received(self, data: bytes) -> None:
        begun = self._in_head
        super().data_received(data)
        if begun and self._in_head:
            self._head_bytes += len(data)
            if self._head_bytes > MAX_HEAD_BYTES:
                message = f"The request's headers have more than {MAX_HEAD_BYTES:,} bytes."
                self.send_400_response(message)

    def on_message_begin(self) -> None:
        super().on_message_begin()
        self._in_head, self._head_bytes = True, 0

    def on_headers_complete(self) -> None:
        self._in_head = False
        super().on_headers_complete()


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
