"""What Ray Serve does not set of uvicorn, on which each ingress replica listens."""

import ctypes
from collections.abc import MutableMapping

import uvicorn.config
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

# HAProxy takes 16 KiB, so only requests that come past it reach this limit.
MAX_HEAD_BYTES = 64 * 1024
# glibc raises its own limit to that of the largest allocation that was freed, up to 32 MiB, and
# keeps what is smaller: a few large bodies would leave the process hundreds of megabytes larger.
MMAP_BYTES = 2**20
_M_MMAP_THRESHOLD = -3


class LimitedProtocol(HttpToolsProtocol):
    """Refuses request heads of more than `MAX_HEAD_BYTES` and one read; uvicorn's has no limit, and
    what it takes for a header grows with the square of the header's length."""

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
    """To be called before Ray starts the server: it passes neither setting on to uvicorn.

    By default uvicorn takes the client's address from `X-Forwarded-For` where the peer is on
    loopback, as HAProxy is. Anybody can send that header through HAProxy.
    """
    uvicorn.config.HTTP_PROTOCOLS["auto"] = f"{__name__}:{LimitedProtocol.__name__}"
    environment.setdefault("FORWARDED_ALLOW_IPS", "")


def return_large_allocations() -> None:
    """From now on, allocations of more than `MMAP_BYTES` go back to the system when freed; without
    effect where the C library is not glibc."""
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is not None:
        mallopt(_M_MMAP_THRESHOLD, MMAP_BYTES)
