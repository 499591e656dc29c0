"""What Ray Serve does not set of uvicorn, on which each ingress replica listens."""

from collections.abc import MutableMapping

import uvicorn.config
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

# HAProxy takes 16 KiB, so only requests that come past it reach this limit.
MAX_HEAD_BYTES = 64 * 1024


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
