"""Models on demand that share their base: LoRA adapters, created and used by Ollama's client."""

from pathlib import Path

import ollama
import pytest

from model_zoo.store.model_name import ModelName
from model_zoo.store.store import Store
from tests.adapter_files import random_pairs, write_adapter
from tests.gguf_files import matrices, rewrite
from tests.unit.serve_app.cli.cli_runs import put, run
from tests.unit.serve_app.on_demand.fake_cluster import cluster_of, official, real_loader
from tests.unit.serve_app.on_demand.fake_loader import FakeLoader
from tests.unit.serve_app.on_demand.test_model_pool import ask, pool_of

SHAPES = {f"blk.{layer}.attn_v.weight": (32, 64) for layer in range(2)}
PROMPT = "the same words before each answer, enough of them to fill some pages of a cache"


@pytest.fixture
def adapters(tmp_path, root) -> list[Path]:
    """Two adapters; a model with the first one merged is in the store as `merged`."""
    base, paths = Store(root).open(ModelName.parse("kept")).files[0], []
    for number in range(2):
        pairs = random_pairs(SHAPES, 4, seed=number)
        paths.append(write_adapter(tmp_path / f"{number}.gguf", pairs, alpha=6.0))
        if number == 0:
            stated = matrices(base)
            changed = {name: stated[name] + 1.5 * (up @ down) for name, (down, up) in pairs.items()}
            merged = rewrite(base, tmp_path / "merged.gguf", tensors=changed)
            put(Store(root), "merged", {"model": merged.read_bytes()})
    return paths


async def said(client: ollama.AsyncClient, model: str) -> str:
    options = {"num_predict": 16, "temperature": 0, "num_ctx": 128}
    return (await client.generate(model, PROMPT, raw=True, options=options)).response


async def test_models_of_one_base_answer_as_if_merged(root, adapters) -> None:
    """Interleaved requests with one prompt: no model reads the cached pages of another."""
    limit = 1 << 30
    async with (
        cluster_of(root, max_loaded_bytes=limit, loaders=real_loader) as cluster,
        official(cluster) as client,
    ):
        for number, path in enumerate(adapters):
            digest = await client.create_blob(path)
            await client.create(f"own{number}", from_="kept", adapters={"a.gguf": digest})
        for _ in range(2):
            plain = await said(client, "kept")
            answers = [await said(client, f"own{number}") for number in range(2)]
            assert answers[0] == await said(client, "merged")
            assert len({plain, *answers}) == 3
        assert Store(root).blob(digest).exists()
        await client.delete("own1")  # it was loaded, so its files were mapped
        assert not Store(root).blob(digest).exists()


async def test_the_modelfile_of_a_model_recreates_its_adapter(root, adapters) -> None:
    async with (
        cluster_of(root, max_loaded_bytes=1 << 30, loaders=real_loader) as cluster,
        official(cluster) as client,
    ):
        digest = await client.create_blob(adapters[0])
        await client.create("one", from_="kept", adapters={"a.gguf": digest})
        shown = (await client.show("one")).modelfile
        assert f"ADAPTER @{digest.replace(':', '-')}" in shown.splitlines()
        body = {"model": "two", "modelfile": shown.replace("FROM one", "FROM kept")}
        await client._request(dict, "POST", "/api/create", json={**body, "stream": False})
        store = Store(root)
        one, two = (store.open(ModelName.parse(name)).adapters for name in ("one", "two"))
        assert one == two and [each.path for each in two] == [store.blob(digest)]
        await client.copy("one", "three")
        await client.delete("one")
        await client.delete("two")
        assert store.blob(digest).exists()
        await client.delete("three")
        assert not store.blob(digest).exists()


async def test_an_adapter_of_wrong_shapes_is_an_error_of_its_model_alone(
    root, tiny, tmp_path
) -> None:
    """A pulled model may have one; a creation refuses it."""
    pairs = random_pairs({"blk.0.attn_v.weight": (16, 64)}, 4)
    path = write_adapter(tmp_path / "small.gguf", pairs)
    async with (
        cluster_of(root, max_loaded_bytes=1 << 30, loaders=real_loader) as cluster,
        official(cluster) as client,
    ):
        digest = await client.create_blob(path)
        with pytest.raises(ollama.ResponseError, match="the adapter is for another model"):
            await client.create("own", from_="kept", adapters={"a.gguf": digest})
        put(Store(root), "own", {"model": tiny, "adapter": path.read_bytes()})
        with pytest.raises(ollama.ResponseError, match="the adapter is for another model"):
            await said(client, "own")
        assert await said(client, "kept")


def test_the_command_line_creates_and_shows_models_with_adapters(root, adapters, tmp_path) -> None:
    modelfile = tmp_path / "Modelfile"
    modelfile.write_text("FROM kept\nADAPTER ./0.gguf\nADAPTER 1.gguf\n")
    run("create", "own", "-f", modelfile, store=Store(root))
    stored = Store(root).open(ModelName.parse("own"))
    assert [each.path.read_bytes() for each in stored.adapters] == [
        path.read_bytes() for path in adapters
    ]
    shown = run("show", "own", store=Store(root)).stdout
    assert all(str(each.path) in shown for each in stored.adapters)
    modelfile.write_text("FROM kept\nADAPTER nowhere.gguf")
    failed = run("create", "other", "-f", modelfile, store=Store(root), status=1)
    assert "nowhere.gguf" in failed.stderr


async def test_a_model_that_shares_most_of_its_weights_unloads_no_other() -> None:
    base = ("/store/base", 80)
    loader = FakeLoader(a=(90, 90, *base), b=(90, 90, *base))
    async with pool_of(loader) as pool:
        for model in ("a", "b"):
            await ask(pool, model)
        assert loader.loads == [("a", 90), ("b", 90)] and loader.unloads == []
        assert pool.free_bytes == 0
