"""Pulls from, and pushes to, the real registry server of the OCI project, started on loopback.

Debian has it as the package `docker-registry`; $CARAVAN_DOCKER_REGISTRY names its binary.
"""

import base64
import datetime
import json
import os
import shutil
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import httpx
import pytest
import yaml
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import padding, rsa

from model_zoo.sources import push as pushing
from model_zoo.sources.download import DownloadStreams
from model_zoo.sources.pull import PullProgress, pull
from model_zoo.sources.reference import parse_source
from model_zoo.store.model_name import ModelName
from model_zoo.store.store import Store, digest_of
from runtime.errors import SourceError
from tests.loopback import Exchange, digest, free_port, serving
from tests.patience import HANG_S, wait_until
from tests.published import CONFIG, MANIFEST_TYPE, manifest_of

BINARY = os.environ.get("CARAVAN_DOCKER_REGISTRY") or shutil.which("docker-registry")
pytestmark = pytest.mark.skipif(
    BINARY is None, reason="no docker-registry in $PATH or $CARAVAN_DOCKER_REGISTRY"
)
WEIGHTS = b"GGUF" + bytes(range(256)) * 4000
LAYERS = [
    ("model", WEIGHTS),
    ("projector", b"GGUF projector"),
    ("template", b"{{ .Prompt }}"),
    ("params", b'{"stop": ["<end>"]}'),
    ("system", b"Be brief."),
    ("license", b"MIT"),
]
STREAMS = DownloadStreams(count=4, part_bytes=100_000)


def answers(address: str) -> bool:
    with suppress(httpx.TransportError):
        httpx.get(f"http://{address}/v2/", trust_env=False)
        return True
    return False


@contextmanager
def running(folder: Path, **further: object) -> Iterator[str]:
    """The registry with its storage in `folder`; yields "host:port"."""
    folder.mkdir()
    address = f"127.0.0.1:{free_port()}"
    config = {
        "version": 0.1,
        "log": {"level": "error"},
        "storage": {"filesystem": {"rootdirectory": str(folder / "storage")}},
        "http": {"addr": address},
        **further,
    }
    (folder / "config.yml").write_text(yaml.safe_dump(config))
    assert BINARY is not None
    log = (folder / "log").open("w")
    process = subprocess.Popen(
        [BINARY, "serve", str(folder / "config.yml")], stdout=log, stderr=subprocess.STDOUT
    )
    try:
        wait_until(lambda: answers(address) or process.poll() is not None)
        assert process.poll() is None, (folder / "log").read_text()
        yield address
    finally:
        process.terminate()
        process.wait(HANG_S)
        log.close()


def push(address: str, name: str, tag: str, headers: dict[str, str] | None = None) -> None:
    """Pushes each blob, then the manifest."""
    with httpx.Client(
        base_url=f"http://{address}/v2/{name}", trust_env=False, headers=headers
    ) as client:
        for data in [CONFIG, *(data for _, data in LAYERS)]:
            begun = client.post("/blobs/uploads/").raise_for_status()
            place = httpx.URL(begun.headers["location"])
            place = place.copy_add_param("digest", digest(data))
            client.put(place, content=data).raise_for_status()
        manifest = json.dumps(manifest_of(LAYERS)).encode()
        kind = {"content-type": MANIFEST_TYPE}
        client.put(f"/manifests/{tag}", content=manifest, headers=kind).raise_for_status()


@pytest.fixture(scope="module")
def address(tmp_path_factory) -> Iterator[str]:
    with running(tmp_path_factory.mktemp("registry") / "open") as address:
        push(address, "library/tiny", "1b")
        yield address


def test_all_layers_are_pulled_from_a_real_registry(address, tmp_path) -> None:
    store = Store(tmp_path / "models")
    reported = []
    source = parse_source(f"ollama://{address}/library/tiny:1b")
    model = pull(source, store, progress=reported.append, streams=STREAMS)
    assert model.files[0].read_bytes() == WEIGHTS
    assert model.projectors[0].read_bytes() == LAYERS[1][1]
    assert [(layer.kind, store.text(layer).encode()) for layer in model.manifest.layers[2:]] == (
        LAYERS[2:]
    )
    assert all(digest_of(store.blob(e.digest)) == e.digest for e in model.manifest.blobs)
    assert reported[-1].status == "success"


def test_an_absent_tag_of_a_real_registry_is_an_error(address, tmp_path) -> None:
    for name in ("library/tiny:7b", "library/other:1b"):
        with pytest.raises(SourceError, match="has no such model"):
            pull(parse_source(f"ollama://{address}/{name}"), Store(tmp_path))


def test_an_absent_blob_of_a_real_registry_is_an_error(tmp_path) -> None:
    with running(tmp_path / "registry") as address:
        push(address, "library/tiny", "1b")
        hexadecimal = digest(WEIGHTS).removeprefix("sha256:")
        lost = tmp_path / "registry/storage/docker/registry/v2/blobs/sha256"
        shutil.rmtree(lost / hexadecimal[:2] / hexadecimal)
        with pytest.raises(SourceError, match="refuses the blob with status 404"):
            pull(parse_source(f"ollama://{address}/library/tiny:1b"), Store(tmp_path / "models"))


def test_a_model_pushed_to_a_real_registry_is_the_same_when_it_is_pulled(address, tmp_path) -> None:
    store, other = Store(tmp_path / "models"), Store(tmp_path / "other")
    tiny = pull(parse_source(f"ollama://{address}/library/tiny:1b"), store, streams=STREAMS)
    name = ModelName.parse(f"{address}/me/copy:2")
    store.commit(name, tiny.manifest)
    reported: list[PullProgress] = []
    pushing.push(name, store, progress=reported.append, chunk_bytes=100_000)
    assert max(step.completed for step in reported) == len(WEIGHTS)
    copied = pull(parse_source(f"ollama://{name}"), other, streams=STREAMS)
    assert copied.manifest.raw == tiny.manifest.raw
    assert all(digest_of(other.blob(e.digest)) == e.digest for e in copied.manifest.blobs)


class TokenServer:
    """Issues short-lived signed tokens, as the real registry requires."""

    def __init__(self) -> None:
        self._key = rsa.generate_private_key(public_exponent=65537, key_size=2048)
        name = x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, "tokens")])
        now = datetime.datetime.now(datetime.UTC)
        self._certificate = (
            x509.CertificateBuilder()
            .subject_name(name)
            .issuer_name(name)
            .public_key(self._key.public_key())
            .serial_number(1)
            .not_valid_before(now - datetime.timedelta(days=1))
            .not_valid_after(now + datetime.timedelta(days=1))
            .add_extension(x509.BasicConstraints(ca=True, path_length=None), critical=True)
            .sign(self._key, hashes.SHA256())
        )

    def certificate(self) -> bytes:
        return self._certificate.public_bytes(serialization.Encoding.PEM)

    def token(self, scope: str, *, life_s: int) -> str:
        kind, name, actions = scope.split(":")
        now = int(time.time())
        der = self._certificate.public_bytes(serialization.Encoding.DER)
        header = {"typ": "JWT", "alg": "RS256", "x5c": [base64.b64encode(der).decode()]}
        claims = {
            "iss": "tokens",
            "sub": "",
            "aud": "registry",
            "iat": now,
            "nbf": now - 60,
            "exp": now + life_s,
            "jti": "1",
            "access": [{"type": kind, "name": name, "actions": actions.split(",")}],
        }
        signed = b".".join(_base64url(json.dumps(part).encode()) for part in (header, claims))
        signature = self._key.sign(signed, padding.PKCS1v15(), hashes.SHA256())
        return b".".join((signed, _base64url(signature))).decode()

    def __call__(self, exchange: Exchange) -> None:
        assert exchange.query["service"] == ["registry"]
        exchange.json({"token": self.token(exchange.query["scope"][0], life_s=60)})


def _base64url(data: bytes) -> bytes:
    return base64.urlsafe_b64encode(data).rstrip(b"=")


def test_a_real_registry_that_requires_a_token_gets_one(tmp_path) -> None:
    issuer = TokenServer()
    (tmp_path / "issuer.pem").write_bytes(issuer.certificate())
    with serving(issuer) as tokens:
        auth = {
            "realm": f"{tokens.url}/token",
            "service": "registry",
            "issuer": "tokens",
            "rootcertbundle": str(tmp_path / "issuer.pem"),
        }
        with running(tmp_path / "guarded", auth={"token": auth}) as address:
            writing = issuer.token("repository:library/tiny:pull,push", life_s=60)
            push(address, "library/tiny", "1b", {"authorization": f"Bearer {writing}"})
            source = parse_source(f"ollama://{address}/library/tiny:1b")
            model = pull(source, Store(tmp_path / "models"), streams=STREAMS)
            assert model.files[0].read_bytes() == WEIGHTS
            assert len(tokens.exchanges) == 1
            assert tokens.exchanges[0].query["scope"] == ["repository:library/tiny:pull"]
            name = ModelName.parse(f"{address}/me/copy:2")
            Store(tmp_path / "models").commit(name, model.manifest)
            pushing.push(name, Store(tmp_path / "models"), chunk_bytes=100_000)
            copied = pull(parse_source(f"ollama://{name}"), Store(tmp_path / "other"))
            assert copied.files[0].read_bytes() == WEIGHTS
