"""Fetching images by URL: allowed and refused hosts, redirects, limits and TLS."""

import asyncio
import contextlib
import datetime
import socket
import ssl
from collections.abc import Iterator

import pytest
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import NameOID

from runtime.errors import ConfigurationError, RequestError
from serve_app.api import image_fetching as fetching
from serve_app.api.image_fetching import ImageFetcher
from serve_app.config.settings import MAX_FETCH_S, ImageUrlSettings, read_settings
from tests.patience import pass_time, settled, until
from tests.unit.serve_app.api.picture_server import (
    HOLD,
    picture_server,
    redirect,
    reply,
)

PICTURE = b"a picture" * 1000


def fetcher(*hosts: str, resolve=None, certificates=None, **change) -> ImageFetcher:
    given = {"allowed_hosts": hosts, "allow_private": True, **change}
    return ImageFetcher(ImageUrlSettings(**given), resolve=resolve, certificates=certificates)


class Names:
    """Resolves every name to the next of some addresses, and counts."""

    def __init__(self, *answers: str | list[str]) -> None:
        self.answers = [[a] if isinstance(a, str) else a for a in answers]
        self.asked: list[str] = []

    async def __call__(self, host: str, port: int) -> list[str]:
        self.asked.append(host)
        return self.answers[min(len(self.asked), len(self.answers)) - 1]


async def test_an_image_is_fetched() -> None:
    async with picture_server({"/a.png?x=1": reply(PICTURE)}) as server:
        found = await fetcher(server.place).fetch(server.url("/a.png?x=1#part"))
    assert found == PICTURE
    head = server.asked[0].lower()
    assert "accept-encoding: identity" in head
    assert "cookie" not in head and "authorization" not in head


async def test_images_are_fetched_by_turns_over_tenants(monkeypatch) -> None:
    monkeypatch.setattr(fetching, "FETCHES_AT_ONCE", 1)
    names, may_answer = Names("127.0.0.1"), asyncio.Event()

    async def resolve(host: str, port: int) -> list[str]:
        await names(host, port)
        await may_answer.wait()
        return []

    fetch = fetcher("*.test", resolve=resolve, timeout_s=MAX_FETCH_S).fetch

    async def ask(host: str, tenant: str) -> None:
        with pytest.raises(RequestError, match="cannot be found"):
            await fetch(f"http://{host}.test/", tenant=tenant)

    asked = [asyncio.create_task(ask(f"flood{number}", "flood")) for number in range(9)]
    await until(lambda: len(names.asked) == 1)
    asked.append(asyncio.create_task(ask("other", "other")))
    await asyncio.sleep(0)
    may_answer.set()
    await asyncio.gather(*asked)
    assert names.asked.index("other.test") == 2


async def test_an_image_with_a_chunked_body_is_fetched() -> None:
    head = b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n"
    async with picture_server({"/": [head, b"3\r\nabc\r\n", b"2\r\nde\r\n0\r\n\r\n"]}) as server:
        assert await fetcher(server.place).fetch(server.url()) == b"abcde"


async def test_a_name_is_resolved_once_and_the_checked_address_is_used() -> None:
    """A second resolution, which DNS rebinding would change, is never made."""
    names = Names("127.0.0.1", "192.0.2.1")
    async with picture_server({"/": reply(PICTURE)}) as server:
        place = f"pictures.test:{server.port}"
        url = server.url(host="Pictures.test.")
        assert await fetcher(place, resolve=names).fetch(url) == PICTURE
    assert names.asked == ["pictures.test"]
    assert f"host: pictures.test.:{server.port}\r\n" in server.asked[0]


@contextlib.contextmanager
def silent_address(host: str, port: int) -> Iterator[None]:
    """Connections to it are neither accepted nor refused."""
    with contextlib.ExitStack() as opened:
        full = opened.enter_context(socket.socket())
        full.bind((host, port))
        full.listen(0)
        for _ in range(8):
            waiting = opened.enter_context(socket.socket())
            waiting.setblocking(False)
            waiting.connect_ex((host, port))
        yield


async def test_the_next_address_is_tried_when_one_does_not_answer() -> None:
    # The port is chosen where other processes have theirs, so that it is free at the other address.
    async with picture_server({"/": reply(PICTURE)}) as server:
        with silent_address("127.0.0.2", server.port):
            names = Names(["127.0.0.2", "127.0.0.1"])
            fetch = fetcher(f"a.test:{server.port}", resolve=names, timeout_s=MAX_FETCH_S).fetch
            fetched = asyncio.create_task(fetch(server.url(host="a.test")))
            await settled()
            await pass_time(MAX_FETCH_S / 2 + 1)
            assert await fetched == PICTURE


async def test_the_next_address_is_tried_when_one_refuses_the_connection() -> None:
    async with picture_server({"/": reply(PICTURE)}) as server:
        names = Names(["127.0.0.2", "127.0.0.1"])  # the server listens on the second alone
        found = await fetcher(f"a.test:{server.port}", resolve=names).fetch(
            server.url(host="a.test")
        )
    assert found == PICTURE


async def test_a_proxy_of_the_environment_is_not_used(monkeypatch) -> None:
    """It would resolve the name a second time."""
    monkeypatch.delenv("NO_PROXY", raising=False)
    monkeypatch.delenv("no_proxy", raising=False)
    async with picture_server({"/": reply(PICTURE)}) as server, picture_server({}) as proxy:
        for name in ("HTTP_PROXY", "http_proxy", "ALL_PROXY", "all_proxy"):
            monkeypatch.setenv(name, proxy.url())
        assert await fetcher(server.place).fetch(server.url()) == PICTURE
    assert proxy.asked == []


@pytest.mark.parametrize(
    ("answers", "reason"),
    [
        (["127.0.0.1"], "it has no public address"),
        (["8.8.8.8", "10.0.0.1"], "it has no public address"),
        (["169.254.169.254"], "it has no public address"),
        (["::ffff:127.0.0.1"], "it has no public address"),
        (["64:ff9b::7f00:1"], "it has no public address"),
        ([], "cannot be found"),
    ],
)
async def test_names_of_local_networks_are_refused_without_a_request(answers, reason) -> None:
    async with picture_server({"/": reply(PICTURE)}) as server:
        place = f"inside.test:{server.port}"
        strict = fetcher(place, resolve=Names(answers), allow_private=False)
        with pytest.raises(RequestError, match=reason):
            await strict.fetch(server.url(host="inside.test"))
    assert server.asked == []


@pytest.mark.parametrize("host", ["127.0.0.1", "[::1]", "localhost", "0x7f.1", "127.1"])
async def test_this_machine_is_refused_however_it_is_written(host) -> None:
    with pytest.raises(RequestError, match=r"no public address|cannot be found"):
        await fetcher(host, allow_private=False).fetch(f"http://{host}/")


async def test_a_redirect_is_followed_and_checked_anew() -> None:
    async with picture_server({"/": redirect("/b"), "/b": reply(PICTURE)}) as server:
        assert await fetcher(server.place).fetch(server.url()) == PICTURE


async def test_a_redirect_to_a_host_that_is_not_allowed_is_refused() -> None:
    async with picture_server({"/": redirect("http://elsewhere.test/")}) as server:
        with pytest.raises(RequestError, match=r'"elsewhere\.test".*not among those'):
            await fetcher(server.place).fetch(server.url())


async def test_a_redirect_to_a_private_address_is_refused() -> None:
    """The second name is allowed, and the first is public; a fake resolver provides both."""
    names = Names("8.8.8.8", "10.0.0.1")
    asked = []

    class Redirecting(ImageFetcher):
        async def _request_from(self, address, target, timeout, received):
            asked.append(address)
            return "http://b.test/"

    settings = ImageUrlSettings(allowed_hosts=("a.test", "b.test"))
    with pytest.raises(RequestError, match=r'"b\.test": it has no public address'):
        await Redirecting(settings, resolve=names).fetch("http://a.test/")
    assert asked == ["8.8.8.8"]


@pytest.mark.parametrize("location", ["file:///etc/passwd", "ftp://127.0.0.1/", "gopher://x/"])
async def test_a_redirect_to_another_scheme_is_refused(location) -> None:
    async with picture_server({"/": redirect(location)}) as server:
        with pytest.raises(RequestError, match="https:// or http://"):
            await fetcher(server.place).fetch(server.url())


async def test_the_number_of_redirects_is_limited() -> None:
    async with picture_server({"/": redirect("/")}) as server:
        with pytest.raises(RequestError, match="redirected more than 2 times"):
            await fetcher(server.place, max_redirects=2).fetch(server.url())
    assert len(server.asked) == 3


@pytest.mark.parametrize(
    "answer",
    [
        [b"HTTP/1.1 200 OK\r\ncontent-length: 99999999\r\n\r\n", HOLD],
        [b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n", b"3e9\r\n" + bytes(1001), HOLD],
        [b"HTTP/1.1 200 OK\r\n\r\n", bytes(1001), HOLD],
    ],
    ids=["declared", "chunked", "until the end"],
)
async def test_too_many_bytes_are_refused_without_waiting_for_all(answer) -> None:
    async with picture_server({"/": answer}) as server:
        with pytest.raises(RequestError, match="larger than 1,000 bytes"):
            await fetcher(server.place, max_bytes=1000).fetch(server.url())


@pytest.mark.parametrize(
    "answer",
    [[HOLD], [b"HTTP/1.1 200 OK\r\ncontent-length: 9\r\n\r\nabc", HOLD], [b"HTTP/1.1 2", HOLD]],
    ids=["no answer", "half a body", "half a head"],
)
async def test_a_slow_server_times_out(answer) -> None:
    async with picture_server({"/": answer}) as server:
        with pytest.raises(RequestError, match=r"did not arrive within 0\.3 seconds"):
            await fetcher(server.place, timeout_s=0.3).fetch(server.url())


async def test_a_slow_name_resolution_times_out() -> None:
    async def never(host: str, port: int) -> list[str]:
        await asyncio.Event().wait()
        return []

    with pytest.raises(RequestError, match=r"did not arrive within 0\.1 seconds"):
        await fetcher("a.test", resolve=never, timeout_s=0.1).fetch("http://a.test/")


@pytest.mark.parametrize(
    ("answer", "reason"),
    [
        (reply(b"gone", status=404), "answered 404"),
        (reply(b"part", status=206), "answered 206"),
        (reply(PICTURE, content_encoding="gzip"), "compressed"),
        (reply(status=302), "sent a redirect without a URL"),
        (b"HTTP/1.1 200 OK\r\ncontent-length: 9\r\n\r\nabc", "RemoteProtocolError"),
        (b"this is not HTTP\r\n\r\n", "RemoteProtocolError"),
        (b"", "RemoteProtocolError"),
    ],
)
async def test_a_reply_that_is_not_an_image_is_refused(answer, reason) -> None:
    async with picture_server({"/": answer}) as server:
        with pytest.raises(RequestError, match=reason):
            await fetcher(server.place).fetch(server.url())


async def test_a_refused_connection_is_reported() -> None:
    async with picture_server({}) as server:
        url, place = server.url(), server.place
    with pytest.raises(RequestError, match=r"cannot be fetched.*ConnectError"):
        await fetcher(place).fetch(url)


ALLOWED = ("a.test", "*.b.test", "c.test:8080", "[2606:4700::1111]", "D.test")


@pytest.mark.parametrize(
    "url",
    [
        "http://a.test/x",
        "https://a.test:443/x",
        "HTTPS://A.TEST./x",
        "http://x.b.test/",
        "http://x.y.b.test/",
        "https://c.test:8080/",
        "http://[2606:4700::1111]/",
        "http://d.test/",
    ],
)
def test_allowed_hosts_are_allowed(url) -> None:
    fetcher(*ALLOWED).check(url)


@pytest.mark.parametrize(
    ("url", "reason"),
    [
        ("http://b.test/", "not among"),
        ("http://xb.test/", "not among"),
        ("http://a.test.evil.test/", "not among"),
        ("http://evil.test/a.test", "not among"),
        ("http://evil.test#@a.test/", "not among"),
        ("http://a.test:8080/", "not among"),
        ("http://a.test:443/", "not among"),
        ("http://a.test:0/", "port 0"),
        ("http://a.test:99999/", "port 99999"),
        ("https://c.test/", "not among"),
        ("http://a.test@evil.test/", "user or password"),
        ("http://user:secret@a.test/", "user or password"),
        ("http:///x", "does not begin with"),
        ("http://a.te\tst/", "is invalid"),
        ("http://" + "a" * 5000, "longer than 4,096"),
    ],
)
def test_other_urls_are_refused(url, reason) -> None:
    with pytest.raises(RequestError, match=reason):
        fetcher(*ALLOWED).check(url)


@pytest.mark.parametrize(
    "hosts", [[], ["*"], ["*.*"], ["http://a.test"], ["a b"], ["a.test/x"], [""], ["a:b"]]
)
def test_an_invalid_host_cannot_be_allowed(hosts) -> None:
    args = {"models": [{"name": "m", "source": "m.gguf"}], "image_urls": {"allowed_hosts": hosts}}
    with pytest.raises(ConfigurationError, match=r"args\.image_urls\.allowed_hosts"):
        read_settings(args)


def _certificate(name: str, folder) -> tuple[ssl.SSLContext, ssl.SSLContext]:
    """For a server of that name, and for a client that trusts it."""
    key = ec.generate_private_key(ec.SECP256R1())
    subject = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, name)])
    now = datetime.datetime.now(datetime.UTC)
    names = x509.SubjectAlternativeName([x509.DNSName(name)])
    certificate = (
        x509.CertificateBuilder()
        .subject_name(subject)
        .issuer_name(subject)
        .public_key(key.public_key())
        .serial_number(1)
        .not_valid_before(now - datetime.timedelta(days=1))
        .not_valid_after(now + datetime.timedelta(days=1))
        .add_extension(names, critical=False)
        .add_extension(x509.BasicConstraints(ca=True, path_length=None), critical=True)
        .sign(key, hashes.SHA256())
    )
    pem = serialization.Encoding.PEM
    (folder / "cert.pem").write_bytes(certificate.public_bytes(pem))
    (folder / "key.pem").write_bytes(
        key.private_bytes(pem, serialization.PrivateFormat.PKCS8, serialization.NoEncryption())
    )
    server = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    server.load_cert_chain(folder / "cert.pem", folder / "key.pem")
    return server, ssl.create_default_context(cafile=str(folder / "cert.pem"))


async def test_a_certificate_must_be_that_of_the_name_in_the_url(tmp_path) -> None:
    theirs, ours = _certificate("pictures.test", tmp_path)
    reported = []
    theirs.sni_callback = lambda _, name, __: reported.append(name)
    names = Names("127.0.0.1")
    async with picture_server({"/": reply(PICTURE)}, tls=theirs) as server:
        places = [f"{name}.test:{server.port}" for name in ("pictures", "other")]
        fetch = fetcher(*places, resolve=names, certificates=ours).fetch
        assert await fetch(server.url(host="pictures.test", scheme="https")) == PICTURE
        with pytest.raises(RequestError, match="ConnectError"):
            await fetch(server.url(host="other.test", scheme="https"))
    assert reported == ["pictures.test", "other.test"]
    assert len(server.asked) == 1


@pytest.mark.parametrize("scheme", ["http", "HTTP"])
async def test_a_redirect_from_https_to_http_is_refused_though_its_host_is_allowed(
    tmp_path, scheme
) -> None:
    theirs, ours = _certificate("pictures.test", tmp_path)
    names = Names("127.0.0.1")
    async with picture_server({"/": reply(PICTURE)}) as plain:
        down = plain.url(host="pictures.test", scheme=scheme)
        pages = {"/": redirect(down), "/same": redirect("/b"), "/b": reply(PICTURE)}
        async with picture_server(pages, tls=theirs) as server:
            places = [f"pictures.test:{port}" for port in (plain.port, server.port)]
            fetch = fetcher(*places, resolve=names, certificates=ours).fetch
            with pytest.raises(RequestError, match="from https:// to http://"):
                await fetch(server.url(host="pictures.test", scheme="https"))
            assert plain.asked == []
            assert await fetch(down) == PICTURE
            same = server.url("/same", host="pictures.test", scheme="https")
            assert await fetch(same) == PICTURE


async def test_a_redirect_from_http_to_https_is_followed_but_not_back(tmp_path) -> None:
    theirs, ours = _certificate("pictures.test", tmp_path)
    secure_pages: dict[str, bytes] = {"/up": reply(PICTURE)}
    async with picture_server(secure_pages, tls=theirs) as secure:
        up = secure.url("/up", host="pictures.test", scheme="https")
        there = secure.url("/back", host="pictures.test", scheme="https")
        pages = {"/": redirect(up), "/round": redirect(there)}
        async with picture_server(pages) as plain:
            secure_pages["/back"] = redirect(plain.url(host="pictures.test"))
            places = [f"pictures.test:{port}" for port in (plain.port, secure.port)]
            fetch = fetcher(*places, resolve=Names("127.0.0.1"), certificates=ours).fetch
            assert await fetch(plain.url(host="pictures.test")) == PICTURE
            with pytest.raises(RequestError, match="from https:// to http://"):
                await fetch(plain.url("/round", host="pictures.test"))
