"""Which keys may manage models, and which pulls use the server's token."""

import json
from contextlib import contextmanager
from pathlib import Path

import pytest

from model_zoo.sources.reference import parse_source
from model_zoo.store.definition import Definition
from model_zoo.store.model_name import ModelName
from model_zoo.store.store import Store
from tests.loopback import digest
from tests.loopback import serving as publishing
from tests.patience import until
from tests.published import Hub
from tests.unit.serve_app.api.api_keys import api_key
from tests.unit.serve_app.cli.cli_runs import put
from tests.unit.serve_app.on_demand.fake_cluster import cluster_of, serving

TOKEN = "hf_secret"
KEYS = (api_key("inference"), api_key("operator", manage=True))
MANAGING = [
    ("POST", "/api/pull", {"model": "fixed", "stream": False}),
    ("POST", "/api/create", {"model": "x", "from": "tiny", "stream": False}),
    ("POST", "/api/copy", {"source": "tiny", "destination": "x"}),
    ("DELETE", "/api/delete", {"model": "tiny"}),
    ("POST", f"/api/blobs/{digest(b'{}')}", {}),
    ("HEAD", f"/api/blobs/{digest(b'')}", {}),
]


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
            reported = answer.json()["error"]
            assert reported == (
                f"API key 'inference' may not use {path[:80]}; its entry lacks `manage: true`"
            )
    assert Store(root).find(ModelName.parse("tiny")) is not None
    assert Store(root).find(ModelName.parse("x")) is None


@pytest.mark.parametrize(("method", "path", "body"), MANAGING)
async def test_a_management_key_manages_models(root, method, path, body):
    async with cluster_of(root) as cluster, serving(cluster, api_keys=KEYS) as client:
        answer = await client.request(method, path, json=body, headers=header("operator"))
        assert answer.status_code in ((404,) if method == "HEAD" else (200, 201))


@contextmanager
def private_hub(tiny: bytes):
    """A fake Hub, which records requests; `org/repo` requires the token."""
    published: list[Hub] = []
    with publishing(lambda exchange: published[0].cdn()(exchange)) as cdn:
        published.append(Hub(cdn.url, token=TOKEN))
        published[0].repositories["org/repo"] = {"tiny-Q8_0.gguf": tiny}
        with publishing(published[0]) as server:
            yield server


def environment_of(server, folder: Path, kept: str) -> dict[str, str]:
    """The environment of a server with a token, in a variable or in the file of a login."""
    (folder / "token").write_text(TOKEN)
    place = {"HF_TOKEN": TOKEN} if kept == "HF_TOKEN" else {kept: str(folder)}
    return {"HF_ENDPOINT": server.url, **place}


def shown(server) -> set[str | None]:
    return {exchange.headers.get("authorization") for exchange in server.exchanges}


@pytest.mark.parametrize("kept", ["HF_TOKEN", "HF_HOME"])
@pytest.mark.parametrize("allowed", [(), ("other/*", "org/else"), ("organisation/*",)])
@pytest.mark.parametrize(
    ("path", "body"),
    [("/api/pull", {"model": "hf://org/repo"}), ("/api/create", {"from": "hf://org/repo"})],
)
async def test_a_clients_pull_does_not_use_the_servers_token(
    tiny, root, tmp_path, kept, allowed, path, body
):
    with private_hub(tiny) as server:
        environment = environment_of(server, tmp_path, kept)
        hosts = {"pull_hosts": ["huggingface.co"], "hf_token_for": allowed}
        async with (
            cluster_of(root, environment=environment, **hosts) as cluster,
            serving(cluster) as client,
        ):
            answer = await client.post(path, json={"model": "x", "stream": False, **body})
            assert answer.status_code == 500
            assert "`on_demand.hf_token_for`" in answer.json()["error"]
        assert server.exchanges and shown(server) == {None}


@pytest.mark.parametrize("allowed", ["org/repo", "ORG/*", "*"])
@pytest.mark.parametrize(
    ("path", "body"),
    [("/api/pull", {"model": "hf://org/repo"}), ("/api/create", {"from": "hf://org/repo"})],
)
async def test_the_configuration_allows_the_token_for_sources(
    tiny, root, tmp_path, allowed, path, body
):
    with private_hub(tiny) as server:
        environment = environment_of(server, tmp_path, "HF_TOKEN")
        hosts = {"pull_hosts": ["huggingface.co"], "hf_token_for": [allowed]}
        async with (
            cluster_of(root, environment=environment, **hosts) as cluster,
            serving(cluster) as client,
        ):
            answer = await client.post(path, json={"model": "x", "stream": False, **body})
            assert json.loads(answer.text) == {"status": "success"}
        assert shown(server) == {f"Bearer {TOKEN}"}


async def test_the_base_of_a_configured_model_is_pulled_with_the_token(tiny, root, tmp_path):
    with private_hub(tiny) as server:
        environment = environment_of(server, tmp_path, "HF_TOKEN")
        async with cluster_of(root, environment=environment) as cluster:
            (process,) = cluster.processes
            definition = Definition(base=parse_source("hf://org/repo"))
            call = process.store_manager.call
            (await call("create", "id", "x", definition, True)).result()

            async def done() -> bool:
                return (await call("operations.follow", "id", 0)).result().done

            await until(done)
        assert shown(server) == {f"Bearer {TOKEN}"}
    assert Store(root).find(ModelName.parse("x")) is not None
