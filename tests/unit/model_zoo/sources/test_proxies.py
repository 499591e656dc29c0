"""Proxies and certificates of the environment."""

import socket
import ssl
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from importlib.machinery import ModuleSpec
from types import SimpleNamespace

import httpx
import pytest

from model_zoo.sources import http, proxies
from model_zoo.sources.http import Http, TransientError
from model_zoo.sources.proxies import ProxiedTransport, proxy_of
from runtime.errors import ConfigurationError
from serve_app.cli.server import Server
from tests.certificates import Authority
from tests.patience import HANG_S

PROXY = "http://proxy:3128"


def chosen(url: str, environment: dict[str, str]) -> str | None:
    """The same by both ways of choosing a proxy."""
    proxy = proxy_of(httpx.URL(url), environment)
    used = []

    def made(through: httpx.Proxy | None) -> httpx.BaseTransport:
        def note(request: httpx.Request) -> httpx.Response:
            used.append(through)
            return httpx.Response(200)

        return httpx.MockTransport(note)

    ProxiedTransport(environment, made).handle_request(httpx.Request("GET", url))
    ((through,), expected) = used, None if proxy is None else str(proxy.url)
    assert (None if through is None else str(through.url)) == expected
    return expected


@pytest.mark.parametrize(
    ("url", "environment", "proxy"),
    [
        ("https://a.org", {}, None),
        ("https://a.org", {"HTTPS_PROXY": PROXY}, PROXY),
        ("https://a.org", {"https_proxy": "proxy:3128", "HTTPS_PROXY": "http://no"}, PROXY),
        ("https://a.org", {"HTTP_PROXY": PROXY}, None),
        ("http://a.org", {"http_proxy": "http://u:p@proxy:3128"}, PROXY),
        ("http://a.org", {"ALL_PROXY": PROXY}, PROXY),
        ("http://localhost:8000", {"ALL_PROXY": PROXY}, None),
        ("http://127.0.0.3:8000", {"ALL_PROXY": PROXY}, None),
        ("http://[::1]:8000", {"ALL_PROXY": PROXY}, None),
    ],
)
def test_the_proxy_of_a_scheme_is_used_except_for_this_machine(url, environment, proxy) -> None:
    assert chosen(url, environment) == proxy


@pytest.mark.parametrize(
    ("entry", "url", "direct"),
    [
        ("*", "https://a.org", True),
        ("a.org", "https://a.org", True),
        ("A.ORG", "https://x.a.org", True),
        (".a.org", "https://x.a.org", True),
        ("a.org", "https://ba.org", False),
        ("*.lan", "http://x.lan", True),
        ("https://a.org", "https://a.org", True),
        ("a.org:8080", "http://a.org:8080", True),
        ("a.org:8080", "http://a.org", False),
        ("a.org:443", "https://a.org", True),
        ("a.org:*", "http://a.org:1", True),
        ("192.168.*", "http://192.168.1.2", True),
        ("10.0.0.0/8", "http://10.1.2.3:8000", True),
        ("10.0.0.0/8", "http://11.1.2.3", False),
        ("10.0.0.0/8", "http://a.org", False),
        ("10.0.0.1:80", "http://10.0.0.1", True),
        ("[fd00::1]:80", "http://[fd00::1]", True),
        ("fd00::1", "http://[fd00::1]", True),
        ("fd00::/8", "http://[fd12::1]", True),
        ("fd00::/8", "http://10.0.0.1", False),
        ("a.org b.org", "https://b.org", True),
        ("", "http://a.org", False),
        (".", "http://a.org", False),
        ("[fd00::]/8", "http://a.org", False),
    ],
)
@pytest.mark.parametrize("variable", ["no_proxy", "NO_PROXY"])
def test_hosts_that_no_proxy_names_are_reached_directly(entry, url, direct, variable) -> None:
    environment = {"ALL_PROXY": PROXY, variable: f"x.example, {entry}"}
    assert (chosen(url, environment) is None) == direct


@pytest.mark.parametrize(
    ("stated", "problem"),
    [
        ("socks5://127.0.0.1:1080", r"ALL_PROXY names a SOCKS proxy, which needs `pip install"),
        ("ftp://secret@proxy", r"ALL_PROXY is not the URL of a proxy"),
        ("http://user:secret@proxy:port", r"ALL_PROXY is not the URL of a proxy"),
        ("http://:3128", r"ALL_PROXY is not the URL of a proxy"),
    ],
)
def test_a_proxy_that_cannot_be_used_is_named_by_its_variable(monkeypatch, stated, problem) -> None:
    monkeypatch.setattr(proxies, "find_spec", lambda name: None)
    monkeypatch.setenv("ALL_PROXY", stated)
    for connect in (Http, lambda: Server("http://a.org", None)):
        with pytest.raises(ConfigurationError, match=problem) as refusal:
            connect()
        assert "secret" not in str(refusal.value)


def test_socks_proxies_are_used_where_their_package_is_installed(monkeypatch) -> None:
    monkeypatch.setattr(proxies, "find_spec", lambda name: ModuleSpec(name, None))
    monkeypatch.setitem(sys.modules, "socksio", SimpleNamespace())
    assert chosen("https://a.org", {"ALL_PROXY": "socks5h://a:1080"}) == "socks5h://a:1080"


def test_waiting_for_a_server_behind_a_proxy_can_be_ended(monkeypatch, tmp_path) -> None:
    """The connection to the server is one of TLS within that to the proxy."""
    own = Authority(tmp_path).environment()
    tls = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    tls.load_cert_chain(own["RAY_TLS_SERVER_CERT"], own["RAY_TLS_SERVER_KEY"])
    unverified = httpx.create_ssl_context(verify=False)
    monkeypatch.setattr(http, "trusted_certificates", lambda: unverified)
    monkeypatch.setattr(http, "TIMEOUT", httpx.Timeout(None))
    asked = threading.Event()

    def be_silent(proxy: socket.socket) -> bytes:
        connection, _ = proxy.accept()
        assert connection.recv(4096).startswith(b"CONNECT a.org:443 ")
        connection.sendall(b"HTTP/1.1 200 OK\r\n\r\n")
        with tls.wrap_socket(connection, server_side=True) as server:
            assert server.recv(4096).startswith(b"GET /x ")
            asked.set()
            return server.recv(1)

    def read(client: Http) -> None:
        with client.stream(httpx.URL("https://a.org/x")):
            pass

    with socket.create_server(("127.0.0.1", 0)) as proxy, ThreadPoolExecutor(2) as pool:
        client = Http(environment={"HTTPS_PROXY": f"http://127.0.0.1:{proxy.getsockname()[1]}"})
        served, reading = pool.submit(be_silent, proxy), pool.submit(read, client)
        assert asked.wait(HANG_S)
        client.hang_up()
        with pytest.raises(TransientError):
            reading.result(HANG_S)
        client.close()
        assert served.result(HANG_S) == b""


def test_certificates_that_cannot_be_read_are_an_error_with_the_variable(
    monkeypatch, tmp_path
) -> None:
    (tmp_path / "empty.pem").touch()
    for name in ("absent.pem", "empty.pem"):
        monkeypatch.setenv("SSL_CERT_FILE", str(tmp_path / name))
        for connect in (Http, lambda: Server("http://a.org", None)):
            with pytest.raises(ConfigurationError, match=r"SSL_CERT_FILE does not name a readable"):
                connect()
