"""Who may manage models where there are keys."""

from pathlib import Path

import pytest

from model_zoo.store.model_name import ModelName
from model_zoo.store.store import Store
from tests.loopback import digest
from tests.tiny_models import write_tiny_llama
from tests.unit.serve_app.api_keys import api_key
from tests.unit.serve_app.cli_runs import put
from tests.unit.serve_app.pretend_cluster import cluster_of, serving

KEYS = (api_key("inference"), api_key("operator", manage=True))
MANAGING = [
    ("POST", "/api/pull", {"model": "fixed", "stream": False}),
    ("POST", "/api/create", {"model": "x", "from": "tiny", "stream": False}),
    ("POST", "/api/copy", {"source": "tiny", "destination": "x"}),
    ("DELETE", "/api/delete", {"model": "tiny"}),
    ("POST", f"/api/blobs/{digest(b'{}')}", {}),
    ("HEAD", f"/api/blobs/{digest(b'')}", {}),
]


@pytest.fixture(scope="module")
def tiny(tmp_path_factory) -> bytes:
    path = tmp_path_factory.mktemp("tiny") / "tiny.gguf"
    write_tiny_llama(path, type="F16")
    return path.read_bytes()


@pytest.fixture
def root(tiny, tmp_path) -> Path:
    put(Store(tmp_path / "store"), "tiny", {"model": tiny})
    return tmp_path / "store"


def header(key: str) -> dict[str, str]:
    return {"authorization": f"Bearer {key}"}


@pytest.mark.parametrize(("method", "path", "body"), [*MANAGING, ("POST", "/api/push", {})])
async def test_an_inference_key_manages_nothing(root, method, path, body):
    async with cluster_of(root) as cluster, serving(cluster, api_keys=KEYS) as client:
        answer = await client.request(method, path, json=body, headers=header("inference"))
        assert answer.status_code == 403
        if method != "HEAD":
            told = answer.json()["error"]
            assert told == (
                "API key 'inference' may not manage models; its entry lacks `manage: true`"
            )
    assert Store(root).find(ModelName.parse("tiny")) is not None
    assert Store(root).find(ModelName.parse("x")) is None


@pytest.mark.parametrize(("method", "path", "body"), MANAGING)
async def test_a_management_key_manages_models(root, method, path, body):
    async with cluster_of(root) as cluster, serving(cluster, api_keys=KEYS) as client:
        answer = await client.request(method, path, json=body, headers=header("operator"))
        assert answer.status_code in ((404,) if method == "HEAD" else (200, 201))
