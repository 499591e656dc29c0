"""Messages of errors: what clients receive, and what is only logged."""

import json

import pytest

from model_zoo.store.store import Store
from runtime.errors import (
    ModelFileError,
    ModelNotFoundError,
    ModelUnavailableError,
    RequestError,
    SourceError,
    StorageFullError,
    StoreError,
)
from serve_app.api.refusals import refusal
from serve_app.transport import wire
from tests.tiny_models import write_tiny_llama
from tests.unit.serve_app.cli.cli_runs import put
from tests.unit.serve_app.on_demand.fake_cluster import cluster_of, real_loader, serving

BLOB = "sha256-" + "ab" * 32


@pytest.mark.parametrize(
    ("error", "reported"),
    [
        (
            StoreError(f"/home/me/.caravan/models/blobs/{BLOB}: cannot write: Is a directory."),
            f"{BLOB}: cannot write: Is a directory.",
        ),
        (
            StorageFullError("/srv/models: the disk has 5 bytes free; set CARAVAN_MODELS."),
            "models: the disk has 5 bytes free; set CARAVAN_MODELS.",
        ),
        (
            ModelUnavailableError(
                "model 'a/b' cannot be served: Model a/b: /x/m.gguf: is no GGUF file."
            ),
            "model 'a/b' cannot be served: Model a/b: m.gguf: is no GGUF file.",
        ),
        (ModelNotFoundError("model '/x/y' not found"), "model '/x/y' not found"),
        (
            SourceError("https://host/v2/library/x: refused with 401; http://[::1]:80/v2/x too."),
            "https://host/v2/library/x: refused with 401; http://[::1]:80/v2/x too.",
        ),
        (
            ModelFileError("hf://org/repo/file.gguf and/or registry.ollama.ai/library/x"),
            "hf://org/repo/file.gguf and/or registry.ollama.ai/library/x",
        ),
        (
            RequestError("'/etc/passwd' is a path; upload it (POST /api/blobs/sha256:…)"),
            "'/etc/passwd' is a path; upload it (POST /api/blobs/sha256:…)",
        ),
    ],
)
def test_errors_name_files_without_their_directories(error, reported):
    assert refusal(error).message == reported


def test_a_full_store_is_507_from_other_processes_too():
    travelled = wire.error_of(wire.failed(StorageFullError("full")))
    assert refusal(travelled).status == 507
    assert refusal(StoreError("damaged")).status == 500


async def test_a_damaged_blob_is_reported_without_its_path_and_logged_with_it(tmp_path, capsys):
    write_tiny_llama(tmp_path / "tiny.gguf", type="F16")
    root = tmp_path / "store"
    put(Store(root), "broken", {"model": (tmp_path / "tiny.gguf").read_bytes()})
    async with cluster_of(root, loaders=real_loader) as cluster, serving(cluster) as client:
        await client.get("/api/tags")
        (blob,) = (root / "blobs").iterdir()
        blob.write_bytes(bytes(blob.stat().st_size))
        shown = await client.post("/api/show", json={"model": "broken"})
        body = {"model": "broken", "prompt": "x", "stream": False}
        generated = await client.post("/api/generate", json=body)
    for answer in (shown, generated):
        reported = answer.json()["error"]
        assert answer.status_code == 500 and blob.name in reported and str(tmp_path) not in reported
    logged = [json.loads(line) for line in capsys.readouterr().err.splitlines()]
    reasons = {line["method"]: line["reason"] for line in logged if line["event"] == "call failed"}
    for method in ("pool.describe", "pool.version"):
        assert str(blob) in reasons[method]
