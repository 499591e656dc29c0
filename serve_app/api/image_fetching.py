"""Fetches images by URL: only from allowed hosts, never from internal addresses, within time and
size limits.

A host name is resolved once, and the connection is made to the addresses that were checked.
"""

import asyncio
import socket
import ssl
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from functools import cached_property

import httpx

from runtime.errors import RequestError
from serve_app.api.addresses import is_public
from serve_app.config.settings import ImageUrlSettings
from serve_app.fair_gate import FairGate

FETCHES_AT_ONCE = 16
MAX_URL_CHARACTERS = 4096
ADDRESSES_TRIED = 4
_PORTS = {"http": 80, "https": 443}
_REDIRECTS = (301, 302, 303, 307, 308)
# Compressed bodies could have any size when decompressed.
_HEADERS = {"accept": "image/*", "accept-encoding": "identity", "user-agent": "caravan"}

Resolve = Callable[[str, int], Awaitable[list[str]]]
Received = Callable[[int], None]


class ImageFetcher:
    """Fetches images within the limits of `settings`. All failures are RequestErrors."""

    def __init__(
        self,
        settings: ImageUrlSettings,
        *,
        resolve: Resolve | None = None,
        certificates: ssl.SSLContext | None = None,
    ) -> None:
        self._settings = settings
        self._resolve = resolve or _addresses
        self._given_certificates = certificates
        self._gate = FairGate(FETCHES_AT_ONCE)

    def check(self, url: str) -> None:
        """Raises RequestError for a URL that would not be fetched. Makes no connection."""
        self._target(url)

    async def fetch(self, url: str, *, tenant: str = "", received: Received | None = None) -> bytes:
        """The body at `url`, after redirects. `received` is called with the bytes of each part of
        it, and may raise to end the fetch."""
        seconds = self._settings.timeout_s
        try:
            async with asyncio.timeout(seconds), self._gate.place(tenant):
                return await self._follow(url, received or _ignore)
        except TimeoutError:
            raise RequestError(
                f"the image did not arrive within {seconds:g} seconds; send it as base64 data"
            ) from None

    async def _follow(self, url: str, received: Received) -> bytes:
        for _ in range(self._settings.max_redirects + 1):
            answer = await self._request(self._target(url), received)
            if isinstance(answer, bytes):
                return answer
            url = answer
        raise RequestError(
            f"the image's URL was redirected more than {self._settings.max_redirects} times"
        )

    def _target(self, url: str) -> "_Target":
        target = _target(url)
        if not any(_covers(allowed, target) for allowed in self._settings.allowed_hosts):
            raise RequestError(
                f'images are not fetched from "{target.place}": the host is not among those that '
                "are allowed; send base64 data"
            )
        return target

    async def _request(self, target: "_Target", received: Received) -> bytes | str:
        """The body, or the URL of a redirect."""
        failure: httpx.HTTPError | None = None
        addresses = await self._checked_addresses(target)
        # Each address has its share of the time, so that those behind a silent one are tried.
        seconds = self._settings.timeout_s
        timeout = httpx.Timeout(seconds, connect=seconds / len(addresses))
        for address in addresses:
            try:
                return await self._request_from(address, target, timeout, received)
            except (httpx.ConnectError, httpx.ConnectTimeout) as error:
                failure = error
            except httpx.HTTPError as error:
                raise _failed(target, error) from None
        assert failure is not None
        raise _failed(target, failure) from None

    async def _checked_addresses(self, target: "_Target") -> list[str]:
        """The addresses of the host. Raises RequestError if one of them is internal."""
        try:
            addresses = await self._resolve(target.host, target.port)
        except (OSError, UnicodeError):
            addresses = []
        if not addresses:
            raise RequestError(f'the host "{target.host}" of the image\'s URL cannot be found')
        if not self._settings.allow_private and not all(map(is_public, addresses)):
            raise RequestError(
                f'images are not fetched from "{target.place}": it has no public address'
            )
        return addresses[:ADDRESSES_TRIED]

    async def _request_from(
        self, address: str, target: "_Target", timeout: httpx.Timeout, received: Received
    ) -> bytes | str:
        # One client per request, so that neither cookies nor connections are shared.
        async with (
            httpx.AsyncClient(
                verify=self._certificates, trust_env=False, timeout=timeout
            ) as client,
            client.stream(
                "GET",
                target.url.copy_with(host=address, userinfo=b"", fragment=None),
                headers={**_HEADERS, "host": target.netloc},
                extensions={"sni_hostname": target.host},
                follow_redirects=False,
            ) as response,
        ):
            if response.status_code in _REDIRECTS:
                return _redirected(target, response)
            return await self._body(target, response, received)

    async def _body(self, target: "_Target", response: httpx.Response, received: Received) -> bytes:
        if response.status_code != 200:
            raise RequestError(f'"{target.place}" has answered {response.status_code}, not 200')
        if response.headers.get("content-encoding", "identity").lower() != "identity":
            raise RequestError(f'"{target.place}" sent the image compressed, unrequested')
        most = self._settings.max_bytes
        declared = response.headers.get("content-length", "")
        size = int(declared) if declared.isdecimal() and len(declared) < 20 else 0
        parts: list[bytes] = []
        if size <= most:
            size = 0
            async for part in response.aiter_raw():
                size += len(part)
                received(len(part))
                parts.append(part)
                if size > most:
                    break
        if size > most:
            raise RequestError(
                f"the image at the URL is larger than {most:,} bytes, the limit for fetched images"
            )
        return b"".join(parts)

    @cached_property
    def _certificates(self) -> ssl.SSLContext:
        return self._given_certificates or httpx.create_ssl_context()


@dataclass(frozen=True, slots=True)
class _Target:
    """The parts of a URL. `host` is in ASCII and lower case, as it is resolved."""

    url: httpx.URL
    host: str
    port: int

    @property
    def standard(self) -> bool:
        return self.port == _PORTS[self.url.scheme]

    @property
    def place(self) -> str:
        """The host, with the port unless it is the scheme's default."""
        return self.host if self.standard else f"{self.host}:{self.port}"

    @property
    def netloc(self) -> str:
        return self.url.netloc.decode("ascii")


def _target(url: str) -> _Target:
    if len(url) > MAX_URL_CHARACTERS:
        raise RequestError(f"the image's URL is longer than {MAX_URL_CHARACTERS:,} characters")
    try:
        parsed = httpx.URL(url)
        host = parsed.raw_host.decode("ascii").lower().rstrip(".")
    except (httpx.InvalidURL, ValueError):
        raise RequestError("the image's URL is invalid") from None
    if parsed.scheme not in _PORTS or not host:
        raise RequestError("the image's URL does not begin with https:// or http:// and a host")
    if parsed.userinfo:
        raise RequestError("the image's URL has a user or password in it, which is not supported")
    port = _PORTS[parsed.scheme] if parsed.port is None else parsed.port
    if not 0 < port < 2**16:
        raise RequestError(f"the image's URL has the port {port}, which is not a valid port")
    return _Target(parsed, host, port)


def _covers(allowed: str, target: _Target) -> bool:
    """Whether a pattern allows the target: `name`, `*.name` for all names below it, each with
    `:port` for another port than the scheme's default.
    """
    name, port = _split_port(allowed.lower())
    if not (target.standard if port is None else target.port == port):
        return False
    return target.host.endswith(name[1:]) if name.startswith("*.") else target.host == name


def _split_port(allowed: str) -> tuple[str, int | None]:
    """The host, an IPv6 address without its brackets, and the port if there is one."""
    host, _, port = allowed.rpartition(":") if allowed.count(":") == 1 else (allowed, "", "")
    if allowed.startswith("["):
        host, _, rest = allowed[1:].partition("]")
        port = rest.removeprefix(":")
    return host, int(port) if port else None


def _redirected(target: _Target, response: httpx.Response) -> str:
    location = response.headers.get("location")
    if not location:
        raise RequestError(f'"{target.place}" sent a redirect without a URL')
    try:
        found = target.url.join(location)
    except (httpx.InvalidURL, ValueError):
        raise RequestError(f'"{target.place}" redirects to an invalid URL') from None
    if target.url.scheme == "https" and found.scheme == "http":
        raise RequestError(
            f'"{target.place}" redirects the image\'s URL from https:// to http://, which is not '
            "followed; send base64 data"
        )
    return str(found)


def _failed(target: _Target, error: httpx.HTTPError) -> RequestError:
    return RequestError(
        f'the image cannot be fetched from "{target.place}" ({type(error).__name__})'
    )


def _ignore(count: int) -> None:
    """The `received` of callers that count nothing."""


async def _addresses(host: str, port: int) -> list[str]:
    found = await asyncio.get_running_loop().getaddrinfo(host, port, type=socket.SOCK_STREAM)
    return list(dict.fromkeys(str(info[4][0]) for info in found))
