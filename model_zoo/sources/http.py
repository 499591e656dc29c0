"""HTTP for sources: bounded, uncompressed, encrypted beyond this machine, stoppable.

This wraps httpx to check each URL of a chain of redirects and give it its own credentials, to limit
bodies, and to end connections that other threads are reading (`hang_up`).
"""

import os
import random
import socket
import time
from collections.abc import Callable, Container, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from datetime import UTC, datetime
from email.utils import parsedate_to_datetime
from typing import Any, Protocol
from weakref import WeakSet

import httpx
from tenacity import RetryCallState, Retrying, retry_if_exception_type, stop_after_attempt

from model_zoo.sources.proxies import ProxiedTransport, is_loopback, trusted_certificates
from runtime.errors import SourceError

TIMEOUT = httpx.Timeout(30.0, connect=15.0)
MAX_REDIRECTS = 5
MAX_CONNECTIONS = 32
READ_DEADLINE_S = 120.0
MAX_ATTEMPTS = 6
# Servers that limit rates request pauses of minutes.
MAX_PAUSE_S = 300.0
PAUSE_SPREAD = 0.25
PAUSE_REPORT_S = 1.0
_REDIRECTS = frozenset({301, 302, 303, 307, 308})
_TRANSIENT = frozenset({408, 425, 429, 500, 502, 503, 504})


class TransientError(Exception):
    """A failure that may pass: a broken connection, an overloaded server."""

    def __init__(self, reason: str, *, retry_after_s: float = 0.0) -> None:
        super().__init__(reason)
        self.retry_after_s = retry_after_s


class StatusError(Exception):
    """The server refused the request with this status."""

    def __init__(self, status: int) -> None:
        super().__init__(f"status {status}")
        self.status = status


class Credentials(Protocol):
    """Provides the `authorization` header of each URL."""

    def authorization(self, url: httpx.URL) -> str | None:
        """The header's value for this URL; None for a host that the credentials are not for."""

    def challenged(self, response: httpx.Response) -> bool:
        """Handles a 401; True if `authorization` returns a new value now."""


@dataclass(frozen=True, slots=True)
class ResponseBody:
    """A whole body; `url`: the final one, after all redirects."""

    body: bytes
    headers: httpx.Headers
    url: httpx.URL


@dataclass(frozen=True, slots=True)
class Response:
    """The final response to a request that changes something, without its body."""

    status: int
    headers: httpx.Headers
    url: httpx.URL


class Http:
    """A pool of connections. `plain_hosts`: "host" or "host:port" that may be unencrypted.

    `insecure_host` may be unencrypted as well, and its certificate is not verified. `pausing` is
    called with the host at least once a second while a request waits to be repeated; an exception
    that it raises ends the request. `environment`: has the proxies. ConfigurationError for a proxy
    or certificates that cannot be used.
    """

    def __init__(
        self,
        *,
        plain_hosts: frozenset[str] = frozenset(),
        insecure_host: str | None = None,
        first_pause_s: float = 0.5,
        pausing: Callable[[str], None] = lambda host: None,
        environment: Mapping[str, str] = os.environ,
    ) -> None:
        self._plain_hosts = plain_hosts
        self._pausing = pausing
        # The scheme has no effect, but with http or https the URL would omit the default port.
        self._insecure = None if insecure_host is None else httpx.URL(f"any://{insecure_host}")
        self._first_pause_s = first_pause_s
        self._connections: WeakSet[Any] = WeakSet()
        limits = httpx.Limits(max_connections=MAX_CONNECTIONS)
        trusted = trusted_certificates()
        mounts: dict[str, httpx.BaseTransport] = {}
        if self._insecure is not None:
            port = "" if self._insecure.port in (None, 80, 443) else f":{self._insecure.port}"
            unverified = httpx.HTTPTransport(verify=False, limits=limits)
            mounts[f"all://{self._insecure.host}{port}"] = unverified
        self._client = httpx.Client(
            transport=ProxiedTransport(
                environment,
                lambda proxy: httpx.HTTPTransport(verify=trusted, limits=limits, proxy=proxy),
            ),
            trust_env=False,
            timeout=TIMEOUT,
            mounts=mounts,
            headers={"accept-encoding": "identity", "user-agent": "caravan"},
        )

    def close(self) -> None:
        self._client.close()

    def hang_up(self) -> None:
        """Shuts every connection down, so that threads that read from one raise TransientError.

        Closing the sockets would not wake them. A connection that is still being established is
        not ended; call again.
        """
        for connection in list(self._connections):
            with suppress(OSError):  # closed already
                socket.socket.shutdown(connection.get_extra_info("socket"), socket.SHUT_RDWR)

    def scheme(self, host: str) -> str:
        """The scheme for a registry of which only the host is given; probes `insecure_host`."""
        url = httpx.URL(f"http://{host}")
        if self._is_insecure(url):
            return "http" if self._speaks_plain_http(url.join("/v2/")) else "https"
        return "http" if self._may_be_plain(url) else "https"

    def _speaks_plain_http(self, url: httpx.URL) -> bool:
        """False for a TLS server, which refuses plain requests or breaks the connection."""
        try:
            with self._client.stream("GET", url, extensions=self._trace) as answer:
                return answer.status_code != 400
        except httpx.TransportError:
            return False

    @contextmanager
    def stream(
        self,
        url: httpx.URL,
        *,
        method: str = "GET",
        headers: Mapping[str, str] | None = None,
        credentials: Credentials | None = None,
    ) -> Iterator[httpx.Response]:
        """The response with status 200 or 206 after redirects; read it with `iter_raw`.

        Raises TransientError, StatusError, or SourceError for a forbidden URL or encoding.
        """
        with _translated(url), self._final(method, url, headers or {}, credentials) as response:
            _check_status(response, (200, 206))
            coding = response.headers.get("content-encoding", "identity")
            if coding.strip().lower() not in ("", "identity"):
                raise SourceError(
                    f"{response.url.host} compresses its data ({coding[:20]}), although the "
                    "request forbids it."
                )
            yield response

    def send(
        self,
        method: str,
        url: httpx.URL,
        *,
        accepted: Container[int],
        content: Callable[[], Iterator[bytes]] | None = None,
        headers: Mapping[str, str] | None = None,
        credentials: Credentials | None = None,
    ) -> Response:
        """Sends one request, without redirects; after a challenge, again with new credentials.

        `content`: begins the body, whose `content-length` is in `headers`. Raises StatusError for a
        status that is not `accepted`, TransientError, or SourceError for a forbidden URL.
        """
        self.check(url)
        challenged = False
        with _translated(url):
            while True:
                stated = None if credentials is None else credentials.authorization(url)
                secret = {} if stated is None else {"authorization": stated}
                with self._client.stream(
                    method,
                    url,
                    content=None if content is None else content(),
                    headers={**(headers or {}), **secret},
                    extensions=self._trace,
                ) as response:
                    if response.status_code == 401 and credentials is not None and not challenged:
                        challenged = True
                        if credentials.challenged(response):
                            continue
                    _check_status(response, accepted)
                    return Response(response.status_code, response.headers, response.url)

    def read(
        self,
        url: httpx.URL,
        *,
        limit_bytes: int,
        headers: Mapping[str, str] | None = None,
        credentials: Credentials | None = None,
    ) -> ResponseBody:
        """A whole body of at most `limit_bytes`; transient failures are retried.

        Raises StatusError, or SourceError if it is too long, too slow or not available.
        """

        def attempt() -> ResponseBody:
            with self.stream(url, headers=headers, credentials=credentials) as response:
                return ResponseBody(_body(response, limit_bytes), response.headers, response.url)

        return self.retrying(url.host)(attempt)

    def retrying(self, host: str, *, sleep: Callable[[float], Any] | None = None) -> Retrying:
        """Retries a function after TransientError; SourceError after `MAX_ATTEMPTS`.

        Pauses grow exponentially, unless the server requests a longer one, each with a random part
        more, so that the nodes of a cluster do not try again together. `sleep`: by default calls
        `pausing`.
        """

        def pause(seconds: float) -> None:
            end = time.monotonic() + seconds
            while (left := end - time.monotonic()) > 0:
                self._pausing(host)
                time.sleep(min(left, PAUSE_REPORT_S))

        def pause_s(state: RetryCallState) -> float:
            stated_s = getattr(_error_of(state), "retry_after_s", 0.0)
            exponential_s = self._first_pause_s * 2 ** (state.attempt_number - 1)
            pause_s = min(MAX_PAUSE_S, max(exponential_s, stated_s))
            return random.uniform(pause_s, (1 + PAUSE_SPREAD) * pause_s)

        def fail(state: RetryCallState) -> None:
            raise SourceError(
                f"{host}: {_error_of(state)}, {MAX_ATTEMPTS} times in a row. Try again later; the "
                "transferred bytes are kept."
            ) from _error_of(state)

        return Retrying(
            retry=retry_if_exception_type(TransientError),
            stop=stop_after_attempt(MAX_ATTEMPTS),
            wait=pause_s,
            sleep=sleep or pause,
            retry_error_callback=fail,
        )

    @contextmanager
    def _final(
        self,
        method: str,
        url: httpx.URL,
        headers: Mapping[str, str],
        credentials: Credentials | None,
    ) -> Iterator[httpx.Response]:
        """The first response that is neither a redirect nor a challenge that can be met.

        Credentials are determined for each URL, so they do not follow a redirect to another host.
        """
        self.check(url)
        redirects, challenged = 0, False
        while True:
            stated = None if credentials is None else credentials.authorization(url)
            secret = {} if stated is None else {"authorization": stated}
            with self._client.stream(
                method, url, headers={**headers, **secret}, extensions=self._trace
            ) as response:
                if response.status_code == 401 and credentials is not None and not challenged:
                    challenged = True
                    if credentials.challenged(response):
                        continue
                if response.status_code not in _REDIRECTS:
                    yield response
                    return
                redirects += 1
                if redirects > MAX_REDIRECTS:
                    raise SourceError(f"{url.host} redirects more than {MAX_REDIRECTS} times.")
                target = response.headers.get("location", "")
            url = self._target(url, target)

    @property
    def _trace(self) -> dict[str, Any]:
        return {"trace": self._connected}

    def _connected(self, event: str, info: Mapping[str, Any]) -> None:
        """httpx's trace hook: records sockets. TLS replaces the object of a connection. The prefix
        of an event is `connection`, or the kind of a proxy."""
        if event.endswith((".connect_tcp.complete", ".start_tls.complete")):
            self._connections.add(info["return_value"])

    def _target(self, url: httpx.URL, location: str) -> httpx.URL:
        try:
            target = url.join(location)
        except httpx.InvalidURL:
            raise SourceError(f"{url.host} redirects to an invalid URL.") from None
        self.check(target, linked_from=url)
        return target

    def check(self, url: httpx.URL, *, linked_from: httpx.URL | None = None) -> None:
        """SourceError for a forbidden URL; no https:// URL leads to an http:// one."""
        plain = url.scheme == "http" and self._may_be_plain(url)
        if plain and linked_from is not None:
            plain = linked_from.scheme == "http"
        if url.host and not url.userinfo and (url.scheme == "https" or plain):
            return
        origin = "" if linked_from is None else f"{linked_from.host} links to "
        raise SourceError(
            f"{origin}{url.scheme or 'no scheme'}://{url.host}: only https:// is allowed, and "
            "http:// to this machine or to hosts that CARAVAN_PLAIN_HTTP_HOSTS names."
        )

    def _may_be_plain(self, url: httpx.URL) -> bool:
        host_and_port = url.host if url.port is None else f"{url.host}:{url.port}"
        if is_loopback(url.host) or self._is_insecure(url):
            return True
        return not self._plain_hosts.isdisjoint({url.host, host_and_port})

    def _is_insecure(self, url: httpx.URL) -> bool:
        if self._insecure is None:
            return False
        named = self._insecure.copy_with(scheme=url.scheme)
        return _origin(named) == _origin(url)


def _error_of(state: RetryCallState) -> BaseException | None:
    return None if state.outcome is None else state.outcome.exception()


def same_origin(one: httpx.URL, other: httpx.URL) -> bool:
    return _origin(one) == _origin(other)


def _origin(url: httpx.URL) -> tuple[str, str, int | None]:
    return url.scheme, url.host, url.port or {"http": 80, "https": 443}.get(url.scheme)


@contextmanager
def _translated(url: httpx.URL) -> Iterator[None]:
    """Turns httpx's errors into ours."""
    try:
        yield
    except httpx.TransportError as error:
        raise TransientError(f"{type(error).__name__}: {error}") from error
    except httpx.HTTPError as error:
        raise SourceError(f"{url.host} sends invalid HTTP: {error}.") from error
    except UnicodeError as error:  # raised by the lookup of the host
        raise SourceError(f"{url.host}, or a host that it redirects to, is invalid.") from error


def _check_status(response: httpx.Response, accepted: Container[int]) -> None:
    status = response.status_code
    if status in _TRANSIENT:
        raise TransientError(f"status {status}", retry_after_s=_retry_after_s(response))
    if status not in accepted:
        raise StatusError(status)


def _retry_after_s(response: httpx.Response) -> float:
    """The pause that the server requests, as seconds or a date; 0 if it states none."""
    stated = response.headers.get("retry-after", "").strip()
    if stated.isdecimal():
        return float(stated) if len(stated) < 6 else 0.0
    try:
        until = parsedate_to_datetime(stated)
        now = response.headers.get("date")  # the server's clock may differ
        begin = datetime.now(UTC) if now is None else parsedate_to_datetime(now)
        return max(0.0, (until - begin).total_seconds())
    except (ValueError, TypeError, OverflowError):
        return 0.0


def _body(response: httpx.Response, limit_bytes: int) -> bytes:
    deadline = time.monotonic() + READ_DEADLINE_S
    body = bytearray()
    for chunk in response.iter_raw():
        body += chunk
        if len(body) > limit_bytes:
            raise SourceError(
                f"{response.url.host} sends more than {limit_bytes:,} bytes, which is the limit."
            )
        if time.monotonic() > deadline:
            raise SourceError(
                f"{response.url.host} did not finish its response within {READ_DEADLINE_S:g} s."
            )
    return bytes(body)
