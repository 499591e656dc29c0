"""Models on demand through HTTP: loading, lists and management."""

import asyncio
import errno
import json
import os
from pathlib import Path

import pytest

from model_zoo.gguf.reader import GGUFFile
from model_zoo.store.model_name import ModelName
from model_zoo.store.store import Store
from runtime.engine.request import SamplingParams
from serve_app.api import reply as reply_module
from serve_app.messages.tasks import ChatTask, RawText
from serve_app.on_demand.processes import UNKNOWN_NAME_S, PoolDirectory
from serve_app.on_demand.store_manager import store_identity
from tests.denied_access import deny
from tests.loopback import digest
from tests.loopback import serving as publishing
from tests.patience import settled, until
from tests.published import Registry
from tests.unit.serve_app.api.api_keys import api_key
from tests.unit.serve_app.cli.cli_runs import put
from tests.unit.serve_app.on_demand.fake_cluster import Cluster, cluster_of, serving

ASK = {"messages": [{"role": "user", "content": "hi"}], "stream": False}


@pytest.fixture
def roots(tiny, tmp_path) -> tuple[Path, Path]:
    """Two stores: `both` is in both, `left` and `right` in one each."""
    for side in ("left", "right"):
        for name in ("both", side):
            put(Store(tmp_path / side), name, {"model": tiny})
    return tmp_path / "left", tmp_path / "right"


def task(model: str) -> ChatTask:
    return ChatTask("t", model, RawText("hi"), SamplingParams(seed=1))


async def chat(client, model: str, **change):
    return await client.post("/api/chat", json={"model": model, **ASK, **change})


def loads(cluster: Cluster) -> list[list[str]]:
    return [[name for name, _ in process.loader.loads] for process in cluster.processes]


async def test_a_model_is_loaded_where_it_is_stored(roots):
    async with cluster_of(*roots) as cluster, serving(cluster) as client:
        for name in ("left", "RIGHT:latest"):
            assert (await chat(client, name)).status_code == 200
        assert loads(cluster) == [["left:latest"], ["right:latest"]]
        missing = await chat(client, "nobody")
        assert (missing.status_code, missing.json()) == (
            404,
            {"error": "model 'nobody' not found"},
        )


async def test_a_model_that_only_an_unreadable_store_may_have_is_not_called_absent(
    roots, monkeypatch
):
    async with cluster_of(*roots) as cluster, serving(cluster) as client:
        with monkeypatch.context() as denied:
            deny(denied, roots[0] / "manifests")
            assert (await chat(client, "right")).status_code == 200
            for _ in range(2):
                refused = await chat(client, "left")
                assert refused.status_code == 500
                assert refused.json() == {"error": "manifests: cannot read: Permission denied."}
        await asyncio.sleep(UNKNOWN_NAME_S)
        assert (await chat(client, "left")).status_code == 200


async def test_concurrent_requests_load_a_model_in_one_process(roots):
    async with cluster_of(*roots) as cluster, serving(cluster) as client:
        answers = await asyncio.gather(*(chat(client, "both") for _ in range(8)))
        assert {answer.status_code for answer in answers} == {200}
        assert sum(map(len, loads(cluster))) == 1
        await chat(client, "both")
        assert sum(map(len, loads(cluster))) == 1


async def test_a_model_is_loaded_where_no_other_must_be_unloaded(roots):
    async with cluster_of(*roots, **{"left:latest": (95, 95)}) as cluster:
        async with serving(cluster) as client:
            await chat(client, "left")
            await chat(client, "both")
        assert loads(cluster) == [["left:latest"], ["both:latest"]]


async def test_avoided_processes_are_chosen_only_if_there_is_no_other(roots):
    async with cluster_of(*roots) as cluster:
        pool = PoolDirectory(cluster)
        first = await pool.choose(task("both"))
        second = await pool.choose(task("both"), avoid=frozenset({first.replica}))
        assert {first.replica, second.replica} == {"p0", "p1"}
        assert first.model == second.model != ""
        only = await pool.choose(task("left"), avoid=frozenset({"p0"}))
        assert only.replica == "p0"
        pool.close()


async def test_a_request_waits_for_a_process_to_start(roots):
    async with cluster_of(*roots) as cluster, serving(cluster) as client:
        for process in cluster.processes:
            process.alive = False
        assert (await chat(client, "both")).status_code == 200
        assert cluster.awaited == 1


async def test_the_first_list_starts_a_process_and_later_ones_do_not(roots):
    async with cluster_of(*roots) as cluster, serving(cluster) as client:
        for _ in range(2):
            for process in cluster.processes:
                process.alive = False
            tags = (await client.get("/api/tags")).json()["models"]
            names = sorted(model["name"] for model in tags)
            assert names == ["both:latest", "fixed:latest", "left:latest", "right:latest"]
            assert cluster.awaited == 1, "known stores need no process"


async def test_lists_cover_all_stores_and_all_processes(roots):
    async with cluster_of(*roots) as cluster, serving(cluster) as client:
        tags = (await client.get("/api/tags")).json()["models"]
        names = [model["name"] for model in tags]
        assert sorted(names) == ["both:latest", "fixed:latest", "left:latest", "right:latest"]
        stored = Store(roots[0]).open(ModelName.parse("left"))
        (left,) = [model for model in tags if model["name"] == "left:latest"]
        assert (left["digest"], left["size"]) == (
            stored.manifest.digest,
            stored.manifest.size_bytes,
        )
        assert left["details"]["family"] == "llama" and left["capabilities"] == ["completion"]
        for name in ("left", "right"):
            await chat(client, name, keep_alive=-1 if name == "left" else "5m")
        running = {m["name"]: m for m in (await client.get("/api/ps")).json()["models"]}
        assert set(running) == {"fixed:latest", "left:latest", "right:latest"}
        assert running["left:latest"]["expires_at"].startswith("2318")
        assert not running["right:latest"]["expires_at"].startswith("2318")
        assert running["left:latest"]["size"] == 10
        data = (await client.get("/v1/models")).json()["data"]
        assert {model["id"] for model in data} == {"fixed", *names} - {"fixed:latest"}


async def test_an_empty_request_loads_or_unloads(roots):
    async with cluster_of(*roots) as cluster, serving(cluster) as client:
        loaded = await chat(client, "left", messages=[])
        assert loaded.json()["done_reason"] == "load" and loads(cluster)[0] == ["left:latest"]
        generated = await client.post("/api/generate", json={"model": "left", "keep_alive": 0})
        assert generated.json()["done_reason"] == "unload"
        assert cluster.processes[0].loader.unloads == ["left:latest"]


async def test_a_proxy_does_not_time_out_while_a_model_is_loaded(roots, monkeypatch):
    monkeypatch.setattr(reply_module, "PROXY_QUIET_S", 0.01)
    async with cluster_of(*roots) as cluster, serving(cluster) as client:
        loader = cluster.processes[0].loader
        loader.may_load.clear()
        body, headers = {"model": "left"}, {"x-forwarded-for": "192.0.2.1"}
        asking = asyncio.create_task(client.post("/api/generate", json=body, headers=headers))
        await until(lambda: cluster.processes[0].store_manager.pool.residents())
        await settled()
        loader.may_load.set()
        answer = await asking
        assert answer.text.startswith(" ") and answer.json()["done_reason"] == "load"


async def test_a_model_that_never_fits_is_503_with_its_memory_need(roots):
    sizes = {"left:latest": (101, 101)}
    async with cluster_of(*roots, **sizes) as cluster, serving(cluster) as client:
        refused = await chat(client, "left")
    assert refused.status_code == 503 and refused.headers["retry-after"] == "30"
    assert "needs 101 bytes" in refused.json()["error"]


@pytest.fixture
def registry(tiny):
    published = Registry()
    published.publish("library/new:latest", [("model", tiny), ("system", b"Be brief.")])
    with publishing(published) as server:
        yield server


def lines(answer) -> list[dict]:
    return [json.loads(line) for line in answer.text.splitlines()]


async def test_each_store_pulls_once_and_progress_ends_with_success(roots, registry):
    name = f"{registry.host}/library/new"
    processes = (*roots, roots[0])
    hosts = [registry.host]
    async with cluster_of(*processes, pull_hosts=hosts) as cluster, serving(cluster) as client:
        reported = lines(await client.post("/api/pull", json={"model": name}))
        assert reported[0] == {"status": "pulling manifest"} and reported[-1] == {
            "status": "success"
        }
        assert any(line.get("total", -1) == line.get("completed") for line in reported)
        manifests = [e for e in registry.exchanges if "/manifests/" in e.path]
        assert len(manifests) == 2  # two stores, three processes
        assert (await chat(client, name)).status_code == 200
        for root in roots:
            assert Store(root).find(ModelName.parse(name)) is not None
        again = await client.post("/api/pull", json={"name": name, "stream": False})
        assert again.json() == {"status": "success"}


async def test_concurrent_pulls_of_one_name_are_joined(roots, registry):
    name = f"{registry.host}/library/new"
    hosts = [registry.host]
    async with cluster_of(roots[0], pull_hosts=hosts) as cluster, serving(cluster) as client:
        body = {"model": name, "stream": False}
        asked = (client.post("/api/pull", json=body) for _ in range(4))
        assert {answer.status_code for answer in await asyncio.gather(*asked)} == {200}
    assert len([e for e in registry.exchanges if "/manifests/" in e.path]) == 1


@pytest.mark.parametrize(
    ("name", "status", "reported"),
    [
        ("", 400, "model is required"),
        ("elsewhere.test/a/b", 400, "pull_hosts"),
        ("169.254.169.254/a/b", 400, "pull_hosts"),
        ("/etc/passwd", 400, "invalid model name: '' cannot be part of a model's name"),
        ("a/b/c/d", 400, "invalid model name: 'a/b/c/d' is not a model's name"),
        ("hf://nobody", 400, "invalid model name"),
        ("ftp://somewhere/x", 400, "invalid model name: ftp:// is not known"),
        ("huggingface.co/org/repo", 400, "give hf://organisation/repository"),
    ],
)
async def test_refused_pulls_name_the_reason(roots, registry, name, status, reported):
    async with (
        cluster_of(*roots, pull_hosts=[registry.host]) as cluster,
        serving(cluster) as client,
    ):
        answer = await client.post("/api/pull", json={"model": name})
        assert reported in answer.text and answer.status_code == status


async def test_a_model_is_deleted_from_every_store_and_unloaded(roots):
    async with cluster_of(*roots) as cluster, serving(cluster) as client:
        await chat(client, "both")
        deleted = await client.request("DELETE", "/api/delete", json={"model": "BOTH"})
        assert (deleted.status_code, deleted.content) == (200, b"")
        unloads = [process.loader.unloads for process in cluster.processes]
        assert sorted(unloads) == [[], ["both:latest"]]
        for root in roots:
            assert Store(root).find(ModelName.parse("both")) is None
        assert (await chat(client, "both")).status_code == 404
        again = await client.request("DELETE", "/api/delete", json={"name": "both"})
        assert again.status_code == 404


def test_the_identity_of_a_store_is_written_once(tmp_path, monkeypatch):
    """A full disk does not change it."""
    stores = [Store(tmp_path / name) for name in ("one", "two", "full")]
    one, two = map(store_identity, stores[:2])
    assert one != two and store_identity(Store(tmp_path / "one")) == one

    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(Path, "write_text", full)
    monkeypatch.setattr(os, "fsync", full)
    assert store_identity(stores[0]) == one
    assert str(tmp_path / "full") in store_identity(stores[2])
    assert [*tmp_path.glob("*/.*")] == [] and [*(tmp_path / "full").iterdir()] == []


async def test_files_of_a_deleted_model_are_removed_when_no_process_maps_them(roots):
    """Such as those of a model with running requests."""
    async with cluster_of(roots[0]) as cluster, serving(cluster) as client:
        Store(roots[0]).remove(ModelName.parse("left"))  # it has the same file
        (file,) = Store(roots[0]).open(ModelName.parse("both")).files
        mapped = GGUFFile.open(file)
        await client.request("DELETE", "/api/delete", json={"model": "both"})
        (process,) = cluster.processes
        process.store_manager.sweep()
        assert file.exists()
        del mapped
        process.store_manager.sweep()
        assert not file.exists()


@pytest.mark.parametrize("name", ["../x", "a/b/c/d", "has space", "x:", "ä"])
async def test_every_route_refuses_invalid_names_with_the_reason(roots, name):
    copied = {"source": name, "destination": "x"}
    asked = [
        ("POST", "/api/pull", {"model": name, "stream": False}),
        ("POST", "/api/pull", {"model": name}),
        ("POST", "/api/show", {"model": name}),
        ("POST", "/api/create", {"model": name, "from": "both"}),
        ("POST", "/api/copy", copied),
        ("POST", "/api/copy", {"source": "both", "destination": name}),
        ("DELETE", "/api/delete", {"model": name}),
    ]
    async with cluster_of(*roots) as cluster, serving(cluster) as client:
        for method, path, body in asked:
            answer = await client.request(method, path, json=body)
            (reported,) = answer.json().values()
            assert answer.status_code == 400 and "error" in answer.json(), (path, reported)
            assert "invalid" in reported and "model's name" in reported, (path, reported)


@pytest.mark.parametrize("newer_first", [False, True])
async def test_a_list_that_was_requested_before_a_change_is_not_kept(roots, tiny, newer_first):
    async with cluster_of(roots[0]) as cluster:
        pool, process = PoolDirectory(cluster), cluster.processes[0]
        process.hold = may_arrive = asyncio.Event()
        older = asyncio.create_task(pool.listed())
        await until(lambda: process.held)
        process.hold = None
        put(Store(roots[0]), "new", {"model": tiny})
        pool.forget()
        if newer_first:
            assert len(await pool.listed()) == 3
        may_arrive.set()
        await older
        assert await pool.find("new") is not None
        pool.close()


async def test_a_model_is_copied_in_the_stores_that_have_it(roots):
    async with cluster_of(*roots) as cluster, serving(cluster) as client:
        body = {"source": "left", "destination": "me/copy:7b"}
        copied = await client.post("/api/copy", json=body)
        assert (copied.status_code, copied.content) == (200, b"")
        assert "content-type" not in copied.headers
        assert (await chat(client, "me/copy:7b")).status_code == 200
        assert Store(roots[1]).find(ModelName.parse("me/copy:7b")) is None
        for change, status in [
            ({"source": "nobody"}, 404),
            ({"source": "../x"}, 400),
            ({"destination": "a/b/c/d"}, 400),
            ({"destination": "fixed"}, 400),
        ]:
            answer = await client.post("/api/copy", json={**body, **change})
            assert answer.status_code == status, change


async def test_a_model_is_created_in_every_store(roots):
    async with cluster_of(*roots) as cluster, serving(cluster) as client:
        body = {"model": "mine", "from": "both", "system": "x", "parameters": {"top_k": 3}}
        reported = lines(await client.post("/api/create", json=body))
        assert reported[-1] == {"status": "success"}
        for root in roots:
            assert Store(root).find(ModelName.parse("mine")) is not None
        modelfile = {"model": "old", "modelfile": "FROM mine\nSYSTEM y", "stream": False}
        assert (await client.post("/api/create", json=modelfile)).json() == {"status": "success"}


@pytest.mark.parametrize(
    ("change", "reported"),
    [
        ({"from": "/etc/passwd"}, "is a path"),
        ({"modelfile": "FROM ./x.gguf"}, "line 1: './x.gguf' is a path"),
        ({"from": "both", "modelfile": "FROM both"}, "exclude each other"),
        ({"from": "both", "template": "{{ .Color }}"}, "template error: line 1: the field .Color"),
        ({"from": "both", "adapters": {"a": "b"}}, "invalid digest format"),
        ({"from": "both", "adapters": {"a": digest(b"")}}, "upload it first"),
        ({"modelfile": "FROM both\nADAPTER ./a.gguf"}, "line 2: './a.gguf' is not an adapter"),
        ({"from": "both", "parameters": {"x": 1}}, 'option "x" is not known'),
        ({"from": "both", "messages": [{"role": "tool", "content": ""}]}, "messages[0].role"),
        ({"from": "both", "quantize": "q9"}, "There is no recipe `q9`"),
        ({"files": {"../m.gguf": digest(b"")}}, "must be relative"),
        ({"files": {"a/m.gguf": digest(b"a"), "m.gguf": digest(b"")}}, "have the name m.gguf"),
        ({"files": {"m.safetensors": digest(b"")}}, "caravan convert"),
        ({"files": {"m.gguf": "md5:1"}}, "invalid digest format"),
        ({"from": "elsewhere.test/a/b"}, "pull_hosts"),
        ({"model": "fixed", "from": "both"}, "part of the configuration"),
        ({}, "neither 'from' or 'files'"),
    ],
)
async def test_invalid_definitions_are_refused(roots, change, reported):
    async with cluster_of(*roots) as cluster, serving(cluster) as client:
        answer = await client.post("/api/create", json={"model": "mine", **change})
        assert reported in answer.json()["error"] and answer.status_code == 400
        assert Store(roots[0]).find(ModelName.parse("mine")) is None


async def test_an_upload_reaches_every_store_and_becomes_a_model(roots, tiny):
    async with cluster_of(*roots) as cluster, serving(cluster) as client:
        blob = f"/api/blobs/{digest(b'new' + tiny).replace(':', '-')}"
        assert (await client.head(blob)).status_code == 404
        assert (await client.post(blob, content=b"new" + tiny)).status_code == 201
        assert (await client.head(blob)).status_code == 200
        assert (await client.post(blob, content=b"")).status_code == 200
        body = {"model": "mine", "files": {"a/m.gguf": digest(tiny)}, "stream": False}
        assert (await client.post("/api/create", json=body)).json() == {"status": "success"}
        for root in roots:
            assert Store(root).blob(digest(b"new" + tiny)).read_bytes() == b"new" + tiny


async def test_an_upload_with_the_wrong_digest_leaves_nothing(roots):
    async with cluster_of(*roots) as cluster, serving(cluster) as client:
        before = sorted(path.name for path in (roots[0] / "blobs").iterdir())
        wrong = await client.post(f"/api/blobs/{digest(b'a')}", content=b"b")
        assert wrong.status_code == 400 and "digest mismatch" in wrong.json()["error"]
        large = await client.post(f"/api/blobs/{digest(b'a')}", content=b"x" * (17 << 20))
        assert large.status_code == 400 and "max_upload_bytes" in large.json()["error"]
        bad = await client.post("/api/blobs/sha256:..", content=b"b")
        assert bad.status_code == 400 and bad.json()["error"] == "invalid digest format"
        assert sorted(path.name for path in (roots[0] / "blobs").iterdir()) == before


MANAGING = [
    ("POST", "/api/pull"),
    ("POST", "/api/create"),
    ("POST", "/api/copy"),
    ("DELETE", "/api/delete"),
    ("POST", f"/api/blobs/{digest(b'')}"),
    ("HEAD", f"/api/blobs/{digest(b'')}"),
]


@pytest.mark.parametrize(("method", "path"), MANAGING)
async def test_management_is_forbidden_unless_enabled(roots, method, path):
    async with cluster_of(*roots) as cluster:
        async with serving(cluster, managed=False) as client:
            assert (await client.request(method, path, json={})).status_code == 403
        async with serving(cluster, api_keys=(api_key("key", manage=True),)) as client:
            assert (await client.request(method, path, json={})).status_code == 401


@pytest.mark.parametrize(
    ("origin", "allowed"),
    [
        ("http://localhost:3000", True),
        ("http://127.0.0.1", True),
        ("http://[::1]:8000", True),
        ("app://obsidian.md", True),
        ("https://elsewhere.test", False),
        ("http://localhost.elsewhere.test", False),
        ("null", False),
        ("http://[", False),
    ],
)
async def test_pages_of_other_origins_manage_models_only_with_a_key(roots, origin, allowed):
    body = {"source": "nobody", "destination": "x"}
    async with cluster_of(*roots) as cluster:
        async with serving(cluster) as client:
            answer = await client.post("/api/copy", json=body, headers={"origin": origin})
            assert answer.status_code == (404 if allowed else 403)
        async with serving(cluster, api_keys=(api_key("key", manage=True),)) as client:
            headers = {"origin": origin, "authorization": "Bearer key"}
            answer = await client.post("/api/copy", json=body, headers=headers)
            assert answer.status_code == 404


@pytest.mark.parametrize(("method", "path"), [*MANAGING, ("POST", "/api/push")])
async def test_allowed_origins_do_not_permit_management_without_keys(roots, method, path):
    body = {"model": "both", "source": "both", "destination": "x"}
    headers = {"origin": "https://elsewhere.test"}
    async with cluster_of(*roots) as cluster, serving(cluster, allowed_origins=("*",)) as client:
        assert (await client.get("/api/tags", headers=headers)).status_code == 200
        refused = await client.request(method, path, json=body, headers=headers)
        assert refused.status_code == 403
        if method != "HEAD":
            assert "without API keys" in refused.json()["error"]
            assert "local pages" in refused.json()["error"]
    for root in roots:
        assert Store(root).find(ModelName.parse("both")) is not None
        assert Store(root).find(ModelName.parse("x")) is None


@pytest.mark.parametrize("origin", ["http://localhost:3000", "http://test"])
async def test_local_pages_and_those_of_the_server_manage_models_without_keys(roots, origin):
    body, headers = {"source": "left", "destination": "x"}, {"origin": origin}
    async with cluster_of(*roots) as cluster, serving(cluster, allowed_origins=("*",)) as client:
        assert (await client.post("/api/copy", json=body, headers=headers)).status_code == 200
    assert Store(roots[0]).find(ModelName.parse("x")) is not None


async def test_allowed_pages_manage_models_with_a_key(roots):
    body = {"source": "left", "destination": "x"}
    headers = {"origin": "https://elsewhere.test", "authorization": "Bearer key"}
    async with (
        cluster_of(*roots) as cluster,
        serving(cluster, api_keys=(api_key("key", manage=True),), allowed_origins=("*",)) as client,
    ):
        assert (await client.post("/api/copy", json=body, headers=headers)).status_code == 200


async def test_unknown_fields_are_ignored(roots):
    async with cluster_of(*roots) as cluster, serving(cluster) as client:
        body = {"source": "both", "destination": "copied", "colour": "red"}
        assert (await client.post("/api/copy", json=body)).status_code == 200
        body = {"model": "made", "modelfile": "FROM both", "colour": "red", "stream": False}
        answer = await client.post("/api/create", json=body)
        assert answer.json() == {"status": "success"}
