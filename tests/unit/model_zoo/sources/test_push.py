"""Pushes to a fake registry: round trips, resumption, and where blobs and credentials are sent."""

import itertools
import ssl
from collections.abc import Callable

import httpx
import pytest

from model_zoo.sources.http import Http
from model_zoo.sources.pull import PullProgress, pull
from model_zoo.sources.push import push
from model_zoo.sources.reference import RegistrySource
from model_zoo.store.creation import create
from model_zoo.store.definition import Definition
from model_zoo.store.model_name import ModelName
from model_zoo.store.store import Store
from runtime.errors import SourceError, StoreError
from tests.certificates import Authority
from tests.loopback import Exchange, Server, digest, serving
from tests.published import Registry
from tests.tiny_models import write_tiny_llama
from tests.unit.model_zoo.sources.test_pull import LAYERS, contents, fetch, registry

CHUNK = 50_000


def pulled(store: Store, server: Server, published: Registry, kinds=LAYERS) -> ModelName:
    """A model of the store that is named after the server, which forgets it."""
    published.publish("library/tiny:1b", kinds)
    name = ModelName.parse(f"{server.host}/library/tiny:1b")
    fetch(RegistrySource(name), store)
    published.blobs.clear()
    published.manifests.clear()
    server.exchanges.clear()
    return name


def send(name: ModelName, store: Store, progress=None, **options) -> None:
    settings = {"environment": {}, "chunk_bytes": CHUNK, "first_pause_s": 0.001, **options}
    push(name, store, progress=progress, **settings)


def methods(server: Server) -> list[str]:
    return [exchange.method for exchange in server.exchanges]


def test_a_pushed_model_is_the_same_when_it_is_pulled(store, tmp_path) -> None:
    published, other = registry(), Store(tmp_path / "other")
    with serving(published) as server:
        name = pulled(store, server, published)
        send(name, store)
        model = fetch(RegistrySource(name), other)
    assert model.manifest.raw == store.manifest(name).raw
    assert contents(other.root / "blobs") == contents(store.root / "blobs")
    assert not published.uploads


def test_progress_has_the_form_that_clients_of_ollama_expect(store) -> None:
    published, reported = registry(), []
    with serving(published) as server:
        name = pulled(store, server, published)
        send(name, store, reported.append)
    statuses = [step.status for step in reported]
    assert statuses[0] == "retrieving manifest"
    assert statuses[-2:] == ["pushing manifest", "success"]
    weights = digest(LAYERS[0][1])
    steps = [step for step in reported if step.digest == weights]
    assert {step.status for step in steps} == {f"pushing {weights[7:19]}"}
    counts = [step.completed for step in steps]
    assert counts == sorted(counts) and counts[0] == 0
    assert counts[-1] == steps[-1].total == len(LAYERS[0][1]) and len(set(counts)) > 3


def test_blobs_of_the_registry_are_not_uploaded_again(store) -> None:
    published = registry()
    with serving(published) as server:
        name = pulled(store, server, published)
        send(name, store)
        server.exchanges.clear()
        send(name, store)
        assert {"POST", "PATCH"}.isdisjoint(methods(server))


def test_a_manifest_without_a_config_gets_one(store, tmp_path) -> None:
    published, other = registry(), Store(tmp_path / "other")
    write_tiny_llama(tmp_path / "tiny.gguf", type="F16")
    with serving(published) as server:
        name = ModelName.parse(f"{server.host}/me/own")
        blob = (tmp_path / "tiny.gguf").read_bytes()
        store.partial(digest(blob)).write_bytes(blob)
        store.partial(digest(blob)).replace(store.blob(digest(blob)))
        create(name, Definition(files={"m.gguf": digest(blob)}, system="x"), store)
        send(name, store, chunk_bytes=1 << 20)
        model = fetch(RegistrySource(name), other)
    assert model.manifest.layers == store.manifest(name).layers
    assert model.manifest.config is not None
    assert b'"model_family":"llama"' in other.blob(model.manifest.config.digest).read_bytes()


def broken_after(published: Registry, nbytes: int, times: int) -> Callable[[Exchange], None]:
    """Breaks the connection within some chunks, of which so many bytes are kept."""
    left = itertools.count(times, -1)

    def answering(exchange: Exchange) -> None:
        if exchange.method != "PATCH" or next(left) <= 0:
            published(exchange)
            return
        session = exchange.path.rpartition("/")[2]
        published.uploads[session] += b"".join(exchange.body())[:nbytes]
        raise ConnectionError

    return answering


@pytest.mark.parametrize(("kept", "times"), [(0, 1), (7, 3), (30_000, 5)])
def test_a_broken_connection_resumes_where_it_ended(store, kept, times) -> None:
    published = registry()
    with serving(published) as source:
        name = pulled(store, source, published)
    with serving(broken_after(published, kept, times)) as server:
        moved = renamed(store, name, server)
        send(moved, store)
        sent = [e for e in server.exchanges if e.method == "PATCH"]
    assert published.blobs[digest(LAYERS[0][1])] == LAYERS[0][1]
    stated = [int(e.headers["content-range"].split("-")[0]) for e in sent]
    assert stated[1] == kept, "what was received is not sent again"
    assert methods(server).count("POST") == len(published.blobs)


def renamed(store: Store, name: ModelName, server: Server) -> ModelName:
    moved = ModelName.parse(f"{server.host}/library/tiny:1b")
    store.commit(moved, store.manifest(name))
    return moved


def test_a_connection_that_always_breaks_is_an_error(store) -> None:
    published = registry()
    with serving(published) as source:
        name = pulled(store, source, published)
    with serving(broken_after(published, 0, 10**6)) as server:
        with pytest.raises(SourceError, match="times in a row"):
            send(renamed(store, name, server), store)
        assert methods(server).count("PATCH") <= 7


def test_a_blob_whose_upload_ended_without_an_answer_is_complete(store) -> None:
    published, lost = registry(), []

    def silent(exchange: Exchange) -> None:
        if exchange.method != "PUT" or "/uploads/" not in exchange.path or lost:
            published(exchange)
            return
        lost.append(exchange)
        exchange.begin = lambda status, headers: None  # type: ignore[method-assign]
        published(exchange)
        raise ConnectionError

    with serving(published) as source:
        name = pulled(store, source, published)
    with serving(silent) as server:
        send(renamed(store, name, server), store)
        assert lost and methods(server).count("POST") == len(published.blobs)


def test_a_lost_session_is_begun_again(store) -> None:
    published, lost = registry(), []

    def forgetful(exchange: Exchange) -> None:
        if exchange.method == "PATCH" and not lost and "50000" in exchange.headers["content-range"]:
            lost.append(published.uploads.clear())
        published(exchange)

    with serving(published) as source:
        name = pulled(store, source, published)
    with serving(forgetful) as server:
        send(renamed(store, name, server), store)
    assert lost and published.blobs[digest(LAYERS[0][1])] == LAYERS[0][1]


def test_a_registry_may_require_larger_chunks(store) -> None:
    published = registry()

    def demanding(exchange: Exchange) -> None:
        if exchange.method == "POST":
            begin = exchange.begin
            exchange.begin = lambda status, headers: begin(  # type: ignore[method-assign]
                status, {**headers, "oci-chunk-min-length": "100000"}
            )
        published(exchange)

    with serving(published) as source:
        name = pulled(store, source, published)
    with serving(demanding) as server:
        send(renamed(store, name, server), store)
        sizes = [int(e.headers["content-length"]) for e in server.exchanges if e.method == "PATCH"]
    assert sizes[:2] == [100_000, len(LAYERS[0][1]) - 100_000]


REFUSALS = [
    ("POST", {"status": 403}, "refuses the blob with status 403; it may require a login"),
    ("POST", {"status": 202, "location": "http://127.0.0.2:1/x"}, "wants the upload at 127.0.0.2"),
    ("POST", {"status": 202, "location": "https://example.com/x"}, "at example.com; blobs are"),
    ("POST", {"status": 202, "location": "http://192.0.2.1/x"}, "only https:// is allowed"),
    ("POST", {"status": 202, "location": "http://a:b@127.0.0.1/x"}, "only https:// is allowed"),
    ("PATCH", {"status": 307, "location": "http://127.0.0.2:1/x"}, "blob with status 307"),
    ("PATCH", {"status": 202, "range": "0-999999999"}, "more bytes than the blob has"),
    ("PATCH", {"status": 202, "range": "0-0"}, "stored too little of a chunk"),
    ("PUT", {"status": 413}, "refuses the blob with status 413"),
    ("HEAD", {"status": 401, "www_authenticate": 'Basic realm="x"'}, r"a login \(Basic\)"),
    ("HEAD", {"status": 400}, "refuses a request for a blob with status 400"),
]


@pytest.mark.parametrize(("method", "answer", "reported"), REFUSALS, ids=[r for *_, r in REFUSALS])
def test_a_refusal_is_an_error_with_the_reason(store, method, answer, reported) -> None:
    published = registry()

    def refusing(exchange: Exchange) -> None:
        if exchange.method != method:
            published(exchange)
            return
        for _ in exchange.body():
            pass
        exchange.answer(**answer)

    with serving(published) as source:
        name = pulled(store, source, published)
    with serving(refusing) as server, pytest.raises(SourceError, match=reported):
        send(renamed(store, name, server), store)
    assert not published.manifests


def test_a_token_is_requested_for_the_scope_that_the_registry_names(store) -> None:
    published = registry()

    def guarded(exchange: Exchange) -> None:
        if exchange.path == "/token":
            exchange.json({"token": exchange.query["scope"][0].replace(":", "_")})
            return
        access = "pull" if exchange.method in ("GET", "HEAD") else "pull,push"
        given = exchange.headers.get("authorization", "").removeprefix("Bearer ")
        if given.endswith((access, "pull,push")):
            published(exchange)
            return
        realm, scope = f"http://{exchange.headers['host']}/token", f"repository:tiny:{access}"
        for _ in exchange.body():
            pass
        exchange.answer(status=401, www_authenticate=f'Bearer realm="{realm}",scope="{scope}"')

    with serving(published) as source:
        name = pulled(store, source, published)
    with serving(guarded) as server:
        send(renamed(store, name, server), store)
        tokens = [e.query["scope"][0] for e in server.exchanges if e.path == "/token"]
    assert tokens == ["repository:tiny:pull", "repository:tiny:pull,push"]
    assert published.manifests


def test_an_exception_of_the_progress_ends_the_push(store) -> None:
    published = registry()

    def cancel(step: PullProgress) -> None:
        if step.completed >= CHUNK:
            raise KeyboardInterrupt

    with serving(published) as server:
        name = pulled(store, server, published)
        with pytest.raises(KeyboardInterrupt):
            send(name, store, cancel)
        assert not published.manifests and not published.blobs


def test_a_model_that_the_store_lacks_is_not_pushed(store, tmp_path) -> None:
    published = registry()
    with serving(published) as server:
        name = pulled(store, server, published)
        store.blob(digest(LAYERS[0][1])).unlink()
        with pytest.raises(StoreError, match="is missing"):
            send(name, store)
        with pytest.raises(StoreError, match="has no model"):
            send(ModelName.parse(f"{server.host}/library/other"), store)
        assert server.exchanges == []


@pytest.fixture
def tls(tmp_path) -> ssl.SSLContext:
    """With a certificate of an unknown authority."""
    files = Authority(tmp_path).environment("127.0.0.1")
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(files["RAY_TLS_SERVER_CERT"], files["RAY_TLS_SERVER_KEY"])
    return context


def test_insecure_accepts_any_certificate(store, tmp_path, tls) -> None:
    published, other = registry(), Store(tmp_path / "other")
    with serving(published) as source:
        name = pulled(store, source, published)
    with serving(published, tls=tls) as server:
        moved = renamed(store, name, server)
        send(moved, store, insecure=True)
        source, settings = RegistrySource(moved), {"environment": {}, "first_pause_s": 0.001}
        assert pull(source, other, insecure=True, **settings).manifest == store.manifest(name)


def test_insecure_accepts_plain_http(store) -> None:
    published = registry()
    with serving(published) as server:
        name = pulled(store, server, published)
        send(name, store, insecure=True)
        assert server.exchanges[0].path == "/v2/" and published.manifests


def test_insecure_concerns_the_named_host_only(store, tls) -> None:
    http = Http(insecure_host="registry.lan:5000")
    http.check(httpx.URL("http://registry.lan:5000/v2/"))
    for named in ("Registry.LAN", "registry.lan:80"):
        Http(insecure_host=named).check(httpx.URL("http://registry.lan/v2/"))
    for url in ("http://registry.lan/v2/", "http://registry.lan:5001/", "http://192.0.2.1/"):
        with pytest.raises(SourceError, match="only https:// is allowed"):
            http.check(httpx.URL(url))
    published = registry()
    with serving(published) as source:
        name = pulled(store, source, published)
    with serving(lambda exchange: exchange.json({"token": "t"}), tls=tls) as tokens:
        realm = f"https://{tokens.host}/token"

        def guarded(exchange: Exchange) -> None:
            exchange.answer(status=401, www_authenticate=f'Bearer realm="{realm}"')

        with serving(guarded) as server:
            refused = pytest.raises(SourceError, match="CERTIFICATE_VERIFY_FAILED")
            with refused:
                send(renamed(store, name, server), store, insecure=True)
