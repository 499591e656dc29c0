"""POST /api/push: to a registry, by Ollama's client, and what is refused."""

import json

import ollama
import pytest

from model_zoo.sources.pull import pull
from model_zoo.sources.reference import RegistrySource
from model_zoo.store.model_name import ModelName
from model_zoo.store.store import Store
from tests.loopback import Exchange, digest
from tests.loopback import serving as publishing
from tests.published import Registry
from tests.unit.serve_app.cli.cli_runs import put
from tests.unit.serve_app.on_demand.fake_cluster import cluster_of, official, serving


@pytest.fixture
def registry():
    with publishing(Registry()) as server:
        yield server


def named(registry, root, tiny: bytes) -> str:
    """A model of the store that is named after the registry."""
    name = f"{registry.host}/me/own:1b"
    put(Store(root), name, {"model": tiny, "system": b"Be brief."})
    return name


@pytest.mark.parametrize("insecure", [False, True])
async def test_a_model_pushed_by_ollamas_client_can_be_pulled(
    root, tiny, registry, tmp_path, insecure
) -> None:
    name, other = named(registry, root, tiny), Store(tmp_path / "other")
    hosts = [registry.host]
    async with cluster_of(root, pull_hosts=hosts) as cluster, official(cluster) as client:
        steps = [step async for step in await client.push(name, insecure=insecure, stream=True)]
        assert (await client.push(name, insecure=insecure)).status == "success"
    statuses = [step.status for step in steps]
    assert statuses[-2:] == ["pushing manifest", "success"]
    (weights,) = {step.digest for step in steps if step.total == len(tiny)}
    assert weights == digest(tiny) and f"pushing {weights[7:19]}" in statuses
    assert max(step.completed or 0 for step in steps) == len(tiny)
    model = pull(RegistrySource(ModelName.parse(name)), other, environment={})
    assert model.manifest.layers == Store(root).manifest(ModelName.parse(name)).layers


async def test_a_model_is_pushed_once_from_a_store_that_has_it(root, tiny, registry, tmp_path):
    name = named(registry, root, tiny)
    stores = (tmp_path / "empty", root, root)
    async with (
        cluster_of(*stores, pull_hosts=[registry.host]) as cluster,
        serving(cluster) as client,
    ):
        answer = await client.post("/api/push", json={"model": name, "stream": False})
        assert (answer.status_code, answer.json()) == (200, {"status": "success"})
    puts = [e for e in registry.exchanges if e.method == "PUT" and "/manifests/" in e.path]
    assert len(puts) == 1


@pytest.mark.parametrize(
    ("name", "status", "reported"),
    [
        ("", 400, "model is required"),
        ("a/b/c/d", 400, "is not a model's name"),
        ("nobody", 404, "model 'nobody' not found"),
        ("kept", 400, "pushes to registry.ollama.ai are not allowed; `on_demand.push_hosts`"),
        ("fixed", 400, "is part of the configuration"),
    ],
)
async def test_refused_pushes_name_the_reason(root, name, status, reported) -> None:
    async with cluster_of(root) as cluster, serving(cluster) as client:
        answer = await client.post("/api/push", json={"model": name})
        assert answer.status_code == status and reported in answer.json()["error"]


async def test_hosts_to_push_to_may_differ_from_those_to_pull_from(root, tiny, registry) -> None:
    name = named(registry, root, tiny)
    hosts = {"pull_hosts": [registry.host], "push_hosts": ["elsewhere.test"]}
    async with cluster_of(root, **hosts) as cluster, serving(cluster) as client:
        answer = await client.post("/api/push", json={"model": name})
        assert answer.status_code == 400 and "allows elsewhere.test" in answer.json()["error"]
    assert registry.exchanges == []


async def test_models_are_not_pushed_where_they_are_not_managed(root) -> None:
    async with cluster_of(root) as cluster, serving(cluster, managed=False) as client:
        answer = await client.post("/api/push", json={"model": "kept"})
        assert answer.status_code == 403 and "not managed" in answer.json()["error"]


async def test_a_refusal_of_the_registry_is_the_last_line(root, tiny) -> None:
    def refusing(exchange: Exchange) -> None:
        exchange.answer(status=404 if exchange.method == "HEAD" else 403)

    with publishing(refusing) as registry:
        name = named(registry, root, tiny)
        async with (
            cluster_of(root, pull_hosts=[registry.host]) as cluster,
            serving(cluster) as client,
        ):
            answer = await client.post("/api/push", json={"model": name})
            *steps, last = map(json.loads, answer.text.splitlines())
            assert steps[0] == {"status": "retrieving manifest"}
            assert "refuses the blob with status 403" in last["error"]
            single = await client.post("/api/push", json={"model": name, "stream": False})
            assert single.status_code >= 400 and "status 403" in single.json()["error"]
        async with (
            cluster_of(root, pull_hosts=[registry.host]) as cluster,
            official(cluster) as client,
        ):
            with pytest.raises(ollama.ResponseError, match="status 403"):
                await client.push(name)
