"""Proxies and certificates that environment variables set, for all HTTP clients of this project.

httpx reads the same variables. But it refuses values of NO_PROXY that are usual elsewhere, such as
`[::1]`, `fd00::/8` and `host:*`, compares networks as if they were single addresses, and its errors
do not name the variable.
"""

import re
import ssl
from collections.abc import Callable, Mapping
from fnmatch import fnmatchcase
from importlib.util import find_spec
from ipaddress import ip_address, ip_network

import httpx

from runtime.errors import ConfigurationError

_PORTS = {"http": 80, "https": 443}
# A host, an address or a network, perhaps with a scheme, brackets, and a port.
_ENTRY = re.compile(
    r"(?:\w+://)?(?:\[(?P<bracketed>[^]]*)\]|(?P<plain>.*?))(?::(?P<port>\d{1,5}|\*))?", re.DOTALL
)


class ProxiedTransport(httpx.BaseTransport):
    """Sends each request through the proxy of its URL, or directly.

    `made`: a transport through a proxy, or without one. Raises ConfigurationError as `proxy_of`.
    """

    def __init__(
        self,
        environment: Mapping[str, str],
        made: Callable[[httpx.Proxy | None], httpx.BaseTransport],
    ) -> None:
        self._environment = environment
        self._direct = made(None)
        proxies = {scheme: _stated_proxy(scheme, environment) for scheme in _PORTS}
        self._proxied = {scheme: made(proxy) for scheme, proxy in proxies.items() if proxy}

    def handle_request(self, request: httpx.Request) -> httpx.Response:
        proxied = self._proxied.get(request.url.scheme)
        if proxied is None or needs_no_proxy(request.url, self._environment):
            return self._direct.handle_request(request)
        return proxied.handle_request(request)

    def close(self) -> None:
        for transport in (self._direct, *self._proxied.values()):
            transport.close()


def proxy_of(url: httpx.URL, environment: Mapping[str, str]) -> httpx.Proxy | None:
    """The proxy for requests to this URL. ConfigurationError if one that the environment names
    cannot be used."""
    return None if needs_no_proxy(url, environment) else _stated_proxy(url.scheme, environment)


def needs_no_proxy(url: httpx.URL, environment: Mapping[str, str]) -> bool:
    """Whether it is on this machine, or NO_PROXY names its host."""
    if is_loopback(url.host):
        return True
    stated = environment.get("no_proxy") or environment.get("NO_PROXY") or ""
    return any(_names(entry, url) for entry in stated.lower().replace(",", " ").split())


def is_loopback(host: str) -> bool:
    if host == "localhost":
        return True
    try:
        return ip_address(host).is_loopback
    except ValueError:
        return False


def trusted_certificates() -> ssl.SSLContext:
    """For connections by TLS: those of SSL_CERT_FILE or SSL_CERT_DIR, or else certifi's.
    ConfigurationError if they cannot be read."""
    try:
        return httpx.create_ssl_context()
    except OSError as error:
        raise ConfigurationError(
            "SSL_CERT_FILE does not name a readable file of certificates in PEM format: "
            f"{error.strerror or error}. Correct or unset it."
        ) from None


def _stated_proxy(scheme: str, environment: Mapping[str, str]) -> httpx.Proxy | None:
    names = (f"{scheme}_proxy", f"{scheme}_proxy".upper(), "all_proxy", "ALL_PROXY")
    variable = next((name for name in names if environment.get(name)), None)
    if variable is None:
        return None
    stated = environment[variable]
    try:
        proxy = httpx.Proxy(stated if "://" in stated else f"http://{stated}")
        if not proxy.url.host:
            raise ValueError("no host")
    except (ValueError, httpx.InvalidURL):  # which may show a password
        raise ConfigurationError(
            f"{variable} is not the URL of a proxy, such as http://proxy:3128. Correct or unset it."
        ) from None
    if proxy.url.scheme.startswith("socks") and find_spec("socksio") is None:
        raise ConfigurationError(
            f"{variable} names a SOCKS proxy, which needs `pip install socksio`. Install it, name "
            "a proxy by http://, or unset the variable."
        )
    return proxy


def _names(entry: str, url: httpx.URL) -> bool:
    """Whether an entry of NO_PROXY is for this URL."""
    parts = _ENTRY.fullmatch(entry)
    assert parts is not None, "every text matches"
    host, port = parts["bracketed"] or parts["plain"] or "", parts["port"]
    if _is_network(entry):
        host, port = entry, None
    if port not in (None, "*") and int(port) != (url.port or _PORTS.get(url.scheme)):
        return False
    if _is_network(host):
        try:
            return ip_address(url.host) in ip_network(host, strict=False)
        except ValueError:
            return False
    if "*" in host:
        return fnmatchcase(url.host, host)
    name = host.lstrip(".")
    return bool(name) and (url.host == name or url.host.endswith(f".{name}"))


def _is_network(text: str) -> bool:
    """Whether it is an address or a network, such as `10.0.0.0/8` and `::1`."""
    try:
        ip_network(text, strict=False)
    except ValueError:
        return False
    return True
