"""HTTP as sources use it: bounded, uncompressed, encrypted beyond this machine, secrets kept."""

import socket
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from ipaddress import ip_address
from typing import Any, Protocol
from weakref import WeakSet

import httpx

from runtime.errors import SourceError

TIMEOUT = httpx.Timeout(30.0, connect=15.0)
MAX_REDIRECTS = 5
MAX_CONNECTIONS = 32
READ_DEADLINE_S = 120.0
ATTEMPTS = 6
LONGEST_PAUSE_S = 30.0
_REDIRECTS = frozenset({301, 302, 303, 307, 308})
_PASSING = frozenset({408, 425, 429, 500, 502, 503, 504})


class Passing(Exception):
    """A failure that may be over soon: a broken connection, a server with too much to do."""

    def __init__(self, reason: str, *, retry_after_s: float = 0.0) -> None:
        super().__init__(reason)
        self.retry_after_s = retry_after_s


class Refused(Exception):
    """The server's answer is no, with this status."""

    def __init__(self, status: int) -> None:
        super().__init__(f"status {status}")
        self.status = status


class Credentials(Protocol):
    """What to show to whom."""

    def authorization(self, url: httpx.URL) -> str | None:
        """The header's value for this very URL; None for every host that it is not meant for."""

    def challenged(self, response: httpx.Response) -> bool:
        """A 401 has come; whether there is now something better to show."""


@dataclass(frozen=True, slots=True)
class Answer:
    """A whole body, with where it came from in the end."""

    body: bytes
    headers: httpx.Headers
    url: httpx.URL


class Http:
    """A pool of connections. `plain_hosts`: "host" or "host:port" that may go unencrypted."""

    def __init__(
        self, *, plain_hosts: frozenset[str] = frozenset(), first_pause_s: float = 0.5
    ) -> None:
        self._plain_hosts = plain_hosts
        self._first_pause_s = first_pause_s
        self._connections: WeakSet[Any] = WeakSet()
        limits = httpx.Limits(max_connections=MAX_CONNECTIONS)
        trusted = httpx.create_ssl_context()
        direct = httpx.HTTPTransport(verify=trusted, limits=limits)
        self._client = httpx.Client(
            verify=trusted,
            timeout=TIMEOUT,
            limits=limits,
            mounts={f"all://{host}": direct for host in ("localhost", "127.0.0.1", "[::1]")},
            headers={"accept-encoding": "identity", "user-agent": "caravan"},
        )

    def close(self) -> None:
        self._client.close()

    def hang_up(self) -> None:
        """End every connection: threads that read from one wake with a failure that is Passing.

        Closing would not wake them. One that is only being made is not ended; ask again.
        """
        for connection in list(self._connections):
            with suppress(OSError):  # over already
                socket.socket.shutdown(connection.get_extra_info("socket"), socket.SHUT_RDWR)

    def scheme(self, host: str) -> str:
        """How a registry named by its host alone is reached."""
        return "http" if self._may_be_plain(httpx.URL(f"http://{host}")) else "https"

    @contextmanager
    def stream(
        self,
        url: httpx.URL,
        *,
        headers: Mapping[str, str] | None = None,
        credentials: Credentials | None = None,
    ) -> Iterator[httpx.Response]:
        """The 200 or 206 that the URL leads to; read it with `iter_raw`.

        Raises Passing, Refused, or SourceError for what must not be followed or read.
        """
        try:
            with self._final(url, headers or {}, credentials) as response:
                _check_status(response)
                coding = response.headers.get("content-encoding", "identity")
                if coding.strip().lower() not in ("", "identity"):
                    raise SourceError(
                        f"{response.url.host} sends its data compressed ({coding[:20]}), "
                        "though it was asked not to; it is not unpacked."
                    )
                yield response
        except httpx.TransportError as error:
            raise Passing(f"{type(error).__name__}: {error}") from error
        except httpx.HTTPError as error:
            raise SourceError(f"{url.host} answers what is no sound HTTP: {error}.") from error
        except UnicodeError as error:  # raised where the host is looked up
            raise SourceError(f"{url.host} is no host, or leads to what is none.") from error

    def read(
        self,
        url: httpx.URL,
        *,
        limit_bytes: int,
        headers: Mapping[str, str] | None = None,
        credentials: Credentials | None = None,
    ) -> Answer:
        """A whole body of at most so many bytes, tried again while failures may pass.

        Raises Refused, and SourceError where it is too long, too slow, or cannot be had.
        """

        patience = self.patience(url.host)
        while True:
            try:
                with self.stream(url, headers=headers, credentials=credentials) as response:
                    return Answer(_body(response, limit_bytes), response.headers, response.url)
            except Passing as failure:
                patience.wait(failure)

    def patience(self, host: str, *, sleep: Callable[[float], object] = time.sleep) -> "Patience":
        return Patience(host, self._first_pause_s, sleep)

    @contextmanager
    def _final(
        self, url: httpx.URL, headers: Mapping[str, str], credentials: Credentials | None
    ) -> Iterator[httpx.Response]:
        """The first answer that is no redirect, and no challenge that can be met.

        What to show is decided anew for every URL, so nothing follows a redirect to a stranger.
        """
        self.check(url)
        redirects, challenged = 0, False
        while True:
            shown = None if credentials is None else credentials.authorization(url)
            secret = {} if shown is None else {"authorization": shown}
            told = {"trace": self._connected}
            with self._client.stream(
                "GET", url, headers={**headers, **secret}, extensions=told
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

    def _connected(self, event: str, info: Mapping[str, Any]) -> None:
        """Told what a request does; a connection is another one once it is encrypted."""
        if event in ("connection.connect_tcp.complete", "connection.start_tls.complete"):
            self._connections.add(info["return_value"])

    def _target(self, url: httpx.URL, location: str) -> httpx.URL:
        try:
            target = url.join(location)
        except httpx.InvalidURL:
            raise SourceError(f"{url.host} redirects to what is no URL.") from None
        self.check(target, linked_from=url)
        return target

    def check(self, url: httpx.URL, *, linked_from: httpx.URL | None = None) -> None:
        """SourceError unless this may be asked; a remote page cannot lead to plain HTTP."""
        plain = url.scheme == "http" and self._may_be_plain(url)
        if plain and linked_from is not None:
            plain = linked_from.scheme == "http"
        if url.host and not url.userinfo and (url.scheme == "https" or plain):
            return
        whence = "" if linked_from is None else f"{linked_from.host} leads to "
        raise SourceError(
            f"{whence}{url.scheme or 'no scheme'}://{url.host}: only https:// is followed, and "
            "http:// on this machine or to hosts that CARAVAN_PLAIN_HTTP_HOSTS names."
        )

    def _may_be_plain(self, url: httpx.URL) -> bool:
        place = url.host if url.port is None else f"{url.host}:{url.port}"
        return is_loopback(url.host) or not self._plain_hosts.isdisjoint({url.host, place})


class Patience:
    """How often, and after which pauses, something is tried again."""

    def __init__(self, host: str, first_pause_s: float, sleep: Callable[[float], object]) -> None:
        self._host = host
        self._first_pause_s = first_pause_s
        self._sleep = sleep
        self._failures = 0

    def wait(self, failure: Passing) -> None:
        """Pause before the next attempt; SourceError when there have been enough."""
        self._failures += 1
        if self._failures >= ATTEMPTS:
            raise SourceError(
                f"{self._host}: {failure}, {ATTEMPTS} times in a row. Try again later; what has "
                "come is kept."
            ) from failure
        pause_s = self._first_pause_s * 2 ** (self._failures - 1)
        self._sleep(min(LONGEST_PAUSE_S, max(pause_s, failure.retry_after_s)))

    def renew(self) -> None:
        """There was progress."""
        self._failures = 0


def is_loopback(host: str) -> bool:
    if host == "localhost":
        return True
    try:
        return ip_address(host).is_loopback
    except ValueError:
        return False


def same_origin(one: httpx.URL, other: httpx.URL) -> bool:
    return _origin(one) == _origin(other)


def _origin(url: httpx.URL) -> tuple[str, str, int | None]:
    return url.scheme, url.host, url.port or {"http": 80, "https": 443}.get(url.scheme)


def _check_status(response: httpx.Response) -> None:
    status = response.status_code
    if status in _PASSING:
        stated = response.headers.get("retry-after", "")
        retry_after_s = float(stated) if stated.isdecimal() and len(stated) < 6 else 0.0
        raise Passing(f"it answers with status {status}", retry_after_s=retry_after_s)
    if status not in (200, 206):
        raise Refused(status)


def _body(response: httpx.Response, limit_bytes: int) -> bytes:
    deadline = time.monotonic() + READ_DEADLINE_S
    body = bytearray()
    for chunk in response.iter_raw():
        body += chunk
        if len(body) > limit_bytes:
            raise SourceError(
                f"{response.url.host} sends more than {limit_bytes:,} bytes where fewer belong."
            )
        if time.monotonic() > deadline:
            raise SourceError(f"{response.url.host} has not ended within {READ_DEADLINE_S:g} s.")
    return bytes(body)
