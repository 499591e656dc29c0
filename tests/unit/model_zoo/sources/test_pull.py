"""Pulls from a fake registry: requests, refusals, and where credentials are sent."""

from contextlib import contextmanager
from pathlib import Path

import httpx
import pytest

from model_zoo.sources.http import Http, StatusError
from model_zoo.sources.pull import PullProgress, pull
from model_zoo.sources.reference import RegistrySource, parse_source
from model_zoo.store.store import Store
from runtime.errors import SourceError, SourceNotFoundError, StoreError
from tests.loopback import Exchange, Server, digest, serving
from tests.published import CONFIG, Registry

LAYERS = [
    ("model", b"GGUF" + bytes(range(256)) * 500),
    ("projector", b"GGUF projector"),
    ("template", b"{{ .Prompt }}"),
    ("params", b'{"temperature": 0.5, "stop": ["<end>"]}'),
    ("system", b"Be brief."),
    ("license", b"MIT"),
    ("license", b"And more."),
    ("messages", b'[{"role": "user", "content": "hi"}]'),
]


def fetch(source, store: Store, progress=None, **environment: str):
    if isinstance(source, str):
        source = parse_source(source)
    return pull(source, store, progress=progress, environment=environment, first_pause_s=0.001)


def from_registry(server: Server, name: str = "library/tiny:1b") -> RegistrySource:
    source = parse_source(f"ollama://{server.host}/{name}")
    assert isinstance(source, RegistrySource)
    return source


def registry(**models) -> Registry:
    published = Registry()
    for name, layers in models.items():
        published.publish(f"library/{name}:1b", layers)
    return published


def contents(folder: Path) -> set[bytes]:
    return {path.read_bytes() for path in folder.glob("sha256-*") if path.is_file()}


def test_every_layer_of_a_model_is_pulled(store) -> None:
    with serving(registry(tiny=LAYERS)) as server:
        model = fetch(from_registry(server), store)
    assert [path.read_bytes() for path in model.files] == [LAYERS[0][1]]
    assert [path.read_bytes() for path in model.projectors] == [LAYERS[1][1]]
    kinds = [(layer.kind, store.text(layer).encode()) for layer in model.manifest.layers]
    assert kinds[2:] == LAYERS[2:]
    assert contents(store.root / "blobs") == {CONFIG, *(data for _, data in LAYERS)}
    assert str(store.names()[0]) == f"{server.host}/library/tiny:1b"


def test_progress_has_the_form_that_clients_of_ollama_expect(store) -> None:
    reported: list[PullProgress] = []
    with serving(registry(tiny=LAYERS)) as server:
        fetch(from_registry(server), store, reported.append)
    statuses = [progress.status for progress in reported]
    assert statuses[0] == "pulling manifest" and statuses[-2:] == ["writing manifest", "success"]
    weights = digest(LAYERS[0][1])
    coming = [progress for progress in reported if progress.digest == weights]
    assert {p.status for p in coming} == {f"pulling {weights[7:19]}", "verifying sha256 digest"}
    counts = [progress.completed for progress in coming]
    assert counts == sorted(counts) and counts[0] == 0
    assert counts[-1] == coming[-1].total == len(LAYERS[0][1])


def test_blobs_of_the_store_are_not_downloaded_again(store) -> None:
    later = [("system", b"Be long.") if kind == "system" else (kind, d) for kind, d in LAYERS]
    with serving(published := registry(tiny=LAYERS)) as server:
        fetch(from_registry(server), store)
        sent = server.sent("/blobs/")
        fetch(from_registry(server), store)
        assert server.sent("/blobs/") == sent
        published.publish("library/tiny:1b", later)
        fetch(from_registry(server), store)
        assert server.sent("/blobs/") == sent + len(b"Be long.")


def test_an_absent_model_is_an_error_with_its_name(store) -> None:
    with serving(registry()) as server, pytest.raises(SourceError, match=r"nothing:1b: .*no such"):
        fetch(from_registry(server, "library/nothing:1b"), store)
    assert not (store.root / "manifests").exists()


@pytest.mark.parametrize(
    ("layers", "message"),
    [
        ([("adapter", b"x")], "no GGUF model, only adapter"),
        ([("tensor", b"x"), ("json", b"{}")], "no GGUF model, only json, tensor"),
    ],
)
def test_a_model_that_cannot_be_served_is_refused_before_the_download(
    store, layers, message
) -> None:
    with serving(registry(tiny=layers)) as server:
        with pytest.raises(SourceError, match=message):
            fetch(from_registry(server), store)
        assert server.sent("/blobs/") == 0


def test_a_model_larger_than_the_disk_is_refused_before_the_download(store) -> None:
    manifest = registry(tiny=LAYERS).publish("library/tiny:1b", LAYERS)
    manifest["layers"][0]["size"] = 1 << 49

    with serving(lambda exchange: exchange.json(manifest)) as server:
        with pytest.raises(StoreError, match="bytes free"):
            fetch(from_registry(server), store)
        assert server.sent("/blobs/") == 0


def test_a_hostile_manifest_writes_nothing_anywhere(store, tmp_path) -> None:
    manifest = registry(tiny=LAYERS).publish("library/tiny:1b", LAYERS)
    hostile = [
        {"digest": "sha256:../../../evil"},
        {"annotations": {"org.opencontainers.image.title": "../../evil.gguf"}},
    ]
    for change in hostile:
        wrong = {**manifest, "layers": [{**manifest["layers"][0], **change}]}
        refused = pytest.raises(SourceError, match="invalid manifest")
        with serving(lambda exchange, wrong=wrong: exchange.json(wrong)) as server, refused:
            fetch(from_registry(server), store)
    assert list(tmp_path.rglob("*")) == []


@contextmanager
def guarded(answering, issued: str = "visitor"):
    """A registry that requires a token, with its token server."""

    def token_server(exchange: Exchange) -> None:
        exchange.json({"token": issued} if "scope" in exchange.query else {})

    with serving(token_server) as tokens:

        def registry_server(exchange: Exchange) -> None:
            if exchange.headers.get("authorization") == f"Bearer {issued}":
                answering(exchange)
                return
            challenge = f'Bearer realm="{tokens.url}/token",service="reg",scope="repository:x:pull"'
            exchange.answer(status=401, www_authenticate=challenge)

        with serving(registry_server) as server:
            yield server, tokens


def test_a_token_is_sent_to_its_registry_only(store) -> None:
    published = registry(tiny=LAYERS)
    with serving(published) as cdn:

        def redirecting(exchange: Exchange) -> None:
            blob = "/blobs/" in exchange.path
            exchange.redirect(cdn.url + exchange.path) if blob else published(exchange)

        with guarded(redirecting) as (server, tokens):
            model = fetch(from_registry(server), store)
            assert model.files[0].read_bytes() == LAYERS[0][1]
            assert tokens.exchanges[0].query == {"service": ["reg"], "scope": ["repository:x:pull"]}
            assert len(tokens.exchanges) == 1
        assert len(cdn.exchanges) >= len(LAYERS)
        for exchange in [*cdn.exchanges, *tokens.exchanges]:
            assert "authorization" not in exchange.headers


def test_an_expired_token_is_replaced(store) -> None:
    published = registry(tiny=LAYERS)
    issued, uses_left = 0, 0

    def short_lived(exchange: Exchange) -> None:
        nonlocal issued, uses_left
        if exchange.path == "/token":
            issued, uses_left = issued + 1, 2
            exchange.json({"access_token": f"t{issued}"})
        elif uses_left and exchange.headers.get("authorization") == f"Bearer t{issued}":
            uses_left -= 1
            published(exchange)
        else:
            realm = f"http://{exchange.headers['host']}/token"
            exchange.answer(status=401, www_authenticate=f'Bearer realm="{realm}"')

    with serving(short_lived) as server:
        assert fetch(from_registry(server), store).files[0].read_bytes() == LAYERS[0][1]
    assert issued == -(-(1 + len(LAYERS) + 1) // 2)  # manifest, layers, config


@pytest.mark.parametrize(
    ("challenge", "message"),
    [
        ('Basic realm="x"', r"requires a login \(Basic\)"),
        ("", "requires a login"),
        ('Bearer realm="http://example.com/token"', "only https:// is allowed"),
        ('Bearer realm="file:///etc/passwd"', "only https:// is allowed"),
        ('Bearer realm="http://user:secret@127.0.0.1/token"', "only https:// is allowed"),
    ],
)
def test_a_challenge_that_cannot_be_met_is_an_error(store, challenge, message) -> None:
    def refusing(exchange: Exchange) -> None:
        exchange.answer(status=401, www_authenticate=challenge)

    with serving(refusing) as server, pytest.raises(SourceError, match=message) as caught:
        fetch(from_registry(server), store)
    assert "secret" not in str(caught.value)


@pytest.mark.parametrize("realm", [' realm="Authentication required", charset="UTF-8"', ""])
def test_a_challenge_without_a_token_server_means_that_there_is_no_such_model(store, realm) -> None:
    """The Hub's answer for a repository that is private or does not exist."""

    def refusing(exchange: Exchange) -> None:
        exchange.answer(status=401, www_authenticate=f"Bearer{realm}")

    with serving(refusing) as server, pytest.raises(SourceNotFoundError, match="or it is private"):
        fetch(from_registry(server), store)


def test_a_token_with_line_breaks_is_refused(store) -> None:
    refused = pytest.raises(SourceError, match="an invalid token")
    with guarded(registry(), issued="a\r\nx-forged: 1") as (server, _), refused:
        fetch(from_registry(server), store)


@pytest.mark.parametrize("target", ["http://192.0.2.1/x", "ftp://127.0.0.1/x", "file:///x"])
def test_a_redirect_to_anything_but_https_is_not_followed(store, target) -> None:
    refused = pytest.raises(SourceError, match=r"127\.0\.0\.1 links to .*: only https:// is")
    with serving(lambda exchange: exchange.redirect(target)) as server, refused:
        fetch(from_registry(server), store)


def test_plain_http_to_another_machine_must_be_allowed(store) -> None:
    with pytest.raises(SourceError, match=r"http://192\.0\.2\.1: only https://"):
        fetch("hf://org/repo", store, HF_ENDPOINT="http://192.0.2.1")
    assert Http().scheme("registry.lan:5000") == "https"
    assert Http(plain_hosts=frozenset({"registry.lan:5000"})).scheme("registry.lan:5000") == "http"
    assert Http(plain_hosts=frozenset({"registry.lan:5000"})).scheme("registry.lan") == "https"
    assert Http(plain_hosts=frozenset({"registry.lan"})).scheme("registry.lan:5000") == "http"
    assert Http().scheme("127.0.0.1:5000") == Http().scheme("localhost:5000") == "http"
    assert Http().scheme("127.0.0.1.example.com") == "https"


def test_https_does_not_redirect_to_plain_http_on_this_machine() -> None:
    here, there = httpx.URL("http://127.0.0.1:80/x"), httpx.URL("https://example.com")
    Http().check(here)
    with pytest.raises(SourceError, match=r"example\.com links to http://127\.0\.0\.1"):
        Http().check(here, linked_from=there)


def test_an_invalid_host_is_an_error(store) -> None:
    with pytest.raises(SourceError, match=r"a\.\.b, or a host .* is invalid"):
        pull(parse_source("ollama://a..b/library/m"), store)
    refused = pytest.raises(SourceError, match=r"127\.0\.0\.1, or a host .* is invalid")
    with serving(lambda exchange: exchange.redirect("https://a..b/x")) as server, refused:
        pull(parse_source(f"ollama://{server.host}/library/m"), store)


def test_the_number_of_redirects_is_limited(store) -> None:
    with serving(lambda exchange: exchange.redirect(exchange.path)) as server:
        with pytest.raises(SourceError, match="redirects more than 5 times"):
            fetch(from_registry(server), store)
        assert len(server.exchanges) == 6


def test_the_hubs_token_is_not_sent_to_registries(store) -> None:
    with serving(registry(tiny=LAYERS)) as server:
        fetch(from_registry(server), store, HF_TOKEN="hf_secret", HF_ENDPOINT="https://127.0.0.2")
        assert all("authorization" not in exchange.headers for exchange in server.exchanges)


@pytest.mark.parametrize("status", [401, 404])
@pytest.mark.parametrize(
    ("name", "hint"),
    [
        ("org/Tiny-GGUF:Q4_K_M", "write hf://org/Tiny-GGUF:Q4_K_M."),
        ("org/Tiny-GGUF", "write hf://org/Tiny-GGUF."),
        ("tiny", None),
        ("hf.co/org/Tiny-GGUF", None),
    ],
)
def test_the_name_of_a_repository_of_the_hub_is_explained(
    monkeypatch, tmp_path, status, name, hint
) -> None:
    def refuse(http: Http, url: httpx.URL, **options: object) -> None:
        raise StatusError(status)

    monkeypatch.setattr(Http, "read", refuse)
    with pytest.raises(SourceNotFoundError, match="has no such model") as refusal:
        fetch(f"ollama://{name}", Store(tmp_path))
    told = str(refusal.value)
    assert told.endswith(hint) if hint else "hf://" not in told
