"""Uploads: limits, quotas, and the removal of incomplete ones."""

import asyncio
import hashlib
import shutil
import threading
import time
from collections.abc import AsyncIterator, Callable, Iterable
from pathlib import Path

import httpx
import pytest

from model_zoo.store.model_name import ModelName
from model_zoo.store.store import Store
from runtime.errors import OverloadedError, RequestError, StorageFullError
from serve_app.api.bodies import BodyLimits
from serve_app.autoscaling.load_metrics import METRIC_NAMES
from serve_app.gateway import model_management
from serve_app.gateway.model_management import ModelManagement
from serve_app.on_demand import uploads as uploads_module
from serve_app.on_demand.processes import PoolDirectory
from serve_app.on_demand.uploads import LEASE_S, MAX_UPLOADS, UploadLimits, Uploads
from tests.patience import HANG_S, settled, until
from tests.unit.serve_app.api.api_keys import api_key
from tests.unit.serve_app.cli.cli_runs import put
from tests.unit.serve_app.on_demand.fake_cluster import Cluster, cluster_of, ingress, serving
from tests.unit.serve_app.sockets import listening

DATA = b"weights " * 1000
DAY_S = 24 * 3600.0


@pytest.fixture
def uploads(store, clock, monkeypatch) -> Iterable[Uploads]:
    monkeypatch.setattr(uploads_module, "LEAST_COUNTED_BYTES", 0)  # files of tests are small
    made = Uploads(store, UploadLimits(file_bytes=1 << 20, quota_bytes=1 << 16), clock=clock)
    yield made
    made.close()


def digest(data: bytes) -> str:
    return f"sha256:{hashlib.sha256(data).hexdigest()}"


def files(root: Path) -> list[str]:
    return sorted(path.name for path in (root / "blobs").iterdir())


def bring(uploads: Uploads, data: bytes, tenant: str = "someone") -> None:
    id = digest(data)[-8:]
    uploads.begin(id, digest(data), None, tenant)
    uploads.append(id, 0, data)
    uploads.finish(id)


def test_an_upload_of_unknown_length_ends_when_the_disk_is_full(uploads, store, monkeypatch):
    uploads.begin("id", digest(DATA), None, "someone")
    full = shutil.disk_usage(store.root)._replace(free=(64 << 20) + 5000)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: full)
    uploads.append("id", 0, b"x" * 5000)
    with pytest.raises(StorageFullError, match="67,113,864 bytes free; 5,001 are needed"):
        uploads.append("id", 5000, b"x" * 5001)
    assert files(store.root) == []


def test_an_aborted_upload_frees_its_bytes_and_its_slot(uploads, store):
    for number in range(3 * MAX_UPLOADS):
        uploads.begin(f"{number}", digest(DATA), None, "someone")
        uploads.append(f"{number}", 0, DATA)
        uploads.abort(f"{number}")
        uploads.abort(f"{number}")
    assert files(store.root) == []
    with pytest.raises(RequestError, match="restart it"):
        uploads.append("0", 0, DATA)


def test_uploads_without_progress_are_dropped(uploads, store, clock):
    for number in range(MAX_UPLOADS):
        uploads.begin(f"{number}", digest(DATA), None, "someone")
    clock.now_s += LEASE_S
    uploads.append("0", 0, DATA)
    with pytest.raises(OverloadedError):
        uploads.begin("another", digest(DATA), None, "someone")
    clock.now_s += 1
    uploads.begin("another", digest(DATA), None, "someone")
    assert len(files(store.root)) == 2
    uploads.append("0", len(DATA), DATA)


def test_uploads_that_no_model_uses_have_a_quota(uploads, store):
    bring(uploads, b"a" * 40_000)
    with pytest.raises(StorageFullError, match=r"40,000 bytes .*`on_demand.upload_quota_bytes`"):
        uploads.begin("declared", digest(DATA), 30_000, "someone")
    uploads.begin("longer", digest(DATA), None, "someone")
    uploads.append("longer", 0, b"b" * 20_000)
    with pytest.raises(StorageFullError, match=r"60,000 bytes .* 20,000 more would exceed"):
        uploads.append("longer", 20_000, b"b" * 20_000)
    bring(uploads, b"c" * 60_000, "another")
    assert len(files(store.root)) == 2


def test_a_small_upload_counts_as_a_larger_one(uploads, monkeypatch):
    """Otherwise a quota of bytes would not limit the number of files."""
    monkeypatch.setattr(uploads_module, "LEAST_COUNTED_BYTES", 1 << 14)
    for number in range(4):
        bring(uploads, bytes([number]))
    with pytest.raises(StorageFullError, match=r"65,536 bytes .* 16,384 more would exceed 65,536"):
        bring(uploads, b"x")
    bring(uploads, b"x", "another")


def test_uploads_that_a_model_uses_do_not_count(uploads, store):
    bring(uploads, b"a" * 40_000)
    put(store, "model", {"model": b"a" * 40_000})
    bring(uploads, b"b" * 40_000)
    store.blob(digest(b"b" * 40_000)).unlink()
    bring(uploads, b"c" * 40_000)
    with pytest.raises(StorageFullError):
        bring(uploads, b"d" * 40_000)


def test_an_upload_continues_while_a_model_is_removed(uploads, store, monkeypatch):
    """A manifest that is listed may be gone when it is read."""
    monkeypatch.setattr(store, "names", lambda **_: [ModelName.parse("removed")])
    bring(uploads, b"a" * 40_000)
    with pytest.raises(StorageFullError, match="upload_quota_bytes"):
        bring(uploads, b"b" * 40_000)


@pytest.fixture
def root(tmp_path) -> Path:
    """The folder of a store with one model, `kept`, whose file is no GGUF."""
    put(Store(tmp_path / "store"), "kept", {"model": DATA})
    return tmp_path / "store"


def management(cluster: Cluster, clock: Callable[[], float]) -> ModelManagement:
    return ModelManagement(PoolDirectory(cluster), [], start_timeout_s=HANG_S, clock=clock)


class Client:
    """A body in pieces; `leave` ends it early."""

    def __init__(self) -> None:
        self._pieces: asyncio.Queue[bytes | None] = asyncio.Queue()

    def send(self, data: bytes) -> None:
        self._pieces.put_nowait(data)

    def leave(self) -> None:
        self._pieces.put_nowait(None)

    async def body(self) -> AsyncIterator[bytes]:
        while (data := await self._pieces.get()) is not None:
            yield data
        raise ConnectionError("the client has left")


@pytest.mark.parametrize("cancelled", [False, True])
async def test_an_upload_ends_with_its_client(root, clock, monkeypatch, cancelled):
    monkeypatch.setattr(model_management, "PIECE_BYTES", 1000)
    before = files(root)
    async with cluster_of(root) as cluster:
        managing = management(cluster, clock)
        for _ in range(2 * MAX_UPLOADS):
            client = Client()
            upload = managing.upload(digest(b"x"), None, client.body(), tenant="someone")
            uploading = asyncio.create_task(upload)
            client.send(b"x" * 3000)
            await until(lambda: len(files(root)) > len(before))
            uploading.cancel() if cancelled else client.leave()
            with pytest.raises(asyncio.CancelledError if cancelled else ConnectionError):
                await uploading
            assert files(root) == before


async def test_a_broken_connection_removes_the_upload(root):
    before, size = files(root), model_management.PIECE_BYTES
    head = [
        f"POST /api/blobs/{digest(b'x')} HTTP/1.1",
        "Host: localhost",
        "Transfer-Encoding: chunked",
    ]
    async with (
        cluster_of(root) as cluster,
        ingress(cluster) as transport,
        listening(transport.app) as port,
    ):
        _, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write("\r\n".join([*head, "", ""]).encode())
        writer.write(f"{size:x}\r\n".encode() + bytes(size) + b"\r\n")
        (partial,) = await new_files(root)
        await until(lambda: (root / "blobs" / partial).stat().st_size == size)
        writer.close()
        await until(lambda: files(root) == before)


async def test_slow_uploads_make_progress(root, clock):
    """Small pieces are written after a while, because uploads without progress are dropped."""
    async with cluster_of(root) as cluster:
        client = Client()
        upload = management(cluster, clock).upload(
            digest(b"x"), None, client.body(), tenant="someone"
        )
        uploading = asyncio.create_task(upload)
        client.send(b"x")
        (partial,) = await new_files(root)

        def written() -> bool:
            clock.now_s += model_management.PIECE_S
            client.send(b"y")
            return (root / "blobs" / partial).stat().st_size >= 2

        await until(written)
        client.leave()
        with pytest.raises(ConnectionError):
            await uploading


async def test_an_upload_that_is_slower_than_bodies_may_be_is_refused(root):
    before, limits = files(root), BodyLimits(1 << 20, grace_s=0.01)

    async def held_back() -> AsyncIterator[bytes]:
        yield DATA
        await asyncio.Event().wait()

    async with (
        cluster_of(root) as cluster,
        ingress(cluster, body_limits=limits) as transport,
        httpx.AsyncClient(transport=transport, base_url="http://test") as client,
    ):
        for _ in range(MAX_UPLOADS + 1):
            async with asyncio.timeout(HANG_S):
                answer = await client.post(f"/api/blobs/{digest(b'x')}", content=held_back())
            assert answer.status_code == 408 and "too slow" in answer.json()["error"]
            assert files(root) == before


async def test_autoscaling_counts_operations_and_uploads(root):
    async with cluster_of(root) as cluster:
        store_manager, may_end = cluster.processes[0].store_manager, threading.Event()
        assert set(store_manager.measures()) == set(METRIC_NAMES)
        store_manager.operations.begin("id", "key", lambda progress: may_end.wait(HANG_S))
        store_manager.operations.begin("joined", "key", lambda progress: None)
        store_manager.uploads.begin("id", digest(b"x"), None, "someone")
        assert store_manager.measures()["operations"] == 2.0
        store_manager.uploads.abort("id")
        may_end.set()
        await until(lambda: store_manager.measures()["operations"] == 0.0)


async def test_closing_waits_for_the_end_of_an_upload_without_stopping_the_process(root):
    async with cluster_of(root) as cluster:
        store_manager = cluster.processes[0].store_manager
        store_manager.uploads.begin("id", digest(b"x"), None, "someone")
        with store_manager.uploads._uploads["id"].lock:  # as while it becomes a blob
            closing = asyncio.create_task(store_manager.close())
            await settled()
            assert not closing.done()
        await closing
        assert len(files(root)) == 1


async def new_files(root: Path) -> list[str]:
    await until(lambda: any("partial" in name for name in files(root)))
    return [name for name in files(root) if "partial" in name]


async def test_each_tenant_has_its_own_quota_and_gets_507_beyond_it(root):
    keys = tuple(api_key(name, manage=True) for name in ("one", "two"))
    async with (
        cluster_of(root, quota_bytes=1 << 20) as cluster,
        serving(cluster, api_keys=keys) as client,
    ):
        for key, status in [("one", 201), ("one", 507), ("two", 201), ("two", 507)]:
            data = f"{key} {status}".encode() * 1000
            headers = {"authorization": f"Bearer {key}"}
            answer = await client.post(f"/api/blobs/{digest(data)}", content=data, headers=headers)
            assert answer.status_code == status
            if status == 507:
                assert "`on_demand.upload_quota_bytes`" in answer.json()["error"]


async def test_a_process_sweeps_its_store(root, clock):
    """Removes uploads without progress, and blobs that no model has used for a day."""
    async with cluster_of(root, clock=clock) as cluster:
        store_manager = cluster.processes[0].store_manager
        uploading = asyncio.create_task(
            management(cluster, clock).upload(digest(b"x"), None, Client().body(), tenant="someone")
        )
        await new_files(root)
        clock.now_s += LEASE_S + 1
        store_manager.sweep()
        kept = [Store(root).blob(digest(DATA)).name]
        assert files(root) == kept
        uploading.cancel()
        unused = Store(root)
        with unused.blob_lock(digest(b"unused")):
            unused.partial(digest(b"unused")).write_bytes(b"unused")
        store_manager.sweep()
        assert len(files(root)) == 2
    later = Store(root, clock=lambda: time.time() + DAY_S + 1)
    async with cluster_of(later) as cluster:
        cluster.processes[0].store_manager.sweep()
        assert files(root) == kept
