"""`caravan pull` and `import`: their progress, output and exit statuses."""

import io
import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Event, Thread

import pytest
from rich.console import Console

from model_zoo.sources.pull import PullProgress, StepWriter
from model_zoo.sources.reference import HubSource, RegistrySource
from model_zoo.store.manifest import LAYER_TYPE, SOURCE, Manifest, ManifestLayer
from model_zoo.store.model_name import ModelName
from model_zoo.store.store import PARTIAL, Store, digest_of
from runtime.errors import CaravanError
from serve_app.cli.progress import MAX_BARS, bars_on
from serve_app.cli.pull import remote_source
from serve_app.cli.serve import config_of
from tests.checkout import ROOT
from tests.denied_access import deny
from tests.patience import HANG_S
from tests.tiny_models import write_tiny_llama
from tests.unit.serve_app.cli.cli_runs import put, run, said

SPLIT = 40_000
# The command without a read timeout, so that only an interrupt ends it. The shell that runs the
# tests in the background may have disabled SIGINT.
WAITING = """
import signal
import httpx
from model_zoo.sources import http
http.TIMEOUT = httpx.Timeout(None)
from serve_app.cli.main import caravan
signal.signal(signal.SIGINT, signal.default_int_handler)
caravan()
"""


class Registry(ThreadingHTTPServer):
    """One model on loopback; `stall`: blobs stop after so many bytes until `go_on` is set.

    `silent`: not even the head of an answer for a blob comes before that.
    """

    daemon_threads = True

    def __init__(self, blobs: dict[str, bytes], manifest: Manifest) -> None:
        super().__init__(("127.0.0.1", 0), Answer)
        self.blobs, self.manifest = blobs, manifest
        self.stall = self.silent = False
        self.stalled, self.go_on = Event(), Event()
        self.ranges: list[str | None] = []

    @property
    def host(self) -> str:
        return f"127.0.0.1:{self.server_port}"


class Answer(BaseHTTPRequestHandler):
    server: Registry

    def do_GET(self) -> None:
        if self.path == "/v2/library/tiny/manifests/latest":
            self.reply(200, self.server.manifest.raw)
        elif self.path.rpartition("/")[2] in self.server.blobs:
            self.blob(self.server.blobs[self.path.rpartition("/")[2]])
        else:
            self.reply(404, b"{}")

    def blob(self, content: bytes) -> None:
        wanted = self.headers.get("Range")
        self.server.ranges.append(wanted)
        if self.server.silent:
            self.server.stalled.set()
            self.server.go_on.wait(HANG_S)
            return
        if wanted is None:
            self.reply(200, content)
            return
        begin, end = map(int, wanted.removeprefix("bytes=").split("-"))
        stated = f"bytes {begin}-{end}/{len(content)}"
        self.reply(206, content[begin : end + 1], **{"Content-Range": stated})

    def reply(self, status: int, content: bytes, **headers: str) -> None:
        self.send_response(status)
        self.send_header("Content-Length", str(len(content)))
        for name, value in headers.items():
            self.send_header(name, value)
        self.end_headers()
        if self.server.stall and len(content) > SPLIT:
            self.wfile.write(content[:SPLIT])
            self.wfile.flush()
            self.server.stalled.set()
            self.server.go_on.wait(HANG_S)
            return
        self.wfile.write(content)

    def log_message(self, *_: object) -> None:
        pass


@pytest.fixture(scope="module")
def tiny(tmp_path_factory) -> Path:
    path = tmp_path_factory.mktemp("models") / "tiny.gguf"
    write_tiny_llama(path, type="Q8_0")
    return path


@pytest.fixture
def registry(tiny, monkeypatch) -> Iterator[Registry]:
    layer = ManifestLayer(f"{LAYER_TYPE}model", digest_of(tiny), tiny.stat().st_size)
    server = Registry({layer.digest: tiny.read_bytes()}, Manifest.of([layer], {}))
    monkeypatch.setenv("CARAVAN_PLAIN_HTTP_HOSTS", server.host)
    thread = Thread(target=server.serve_forever, args=[0.05])
    thread.start()
    yield server
    server.go_on.set()
    server.shutdown()
    thread.join()
    server.server_close()


def test_pull_prints_plain_lines(registry, store):
    name = f"{registry.host}/library/tiny:latest"
    result = run("pull", name, store=store)
    assert result.stdout.startswith(f"{name}: ")
    lines = result.stderr.splitlines()
    digest = registry.manifest.layers[0].digest.removeprefix("sha256:")
    assert lines[0] == "pulling manifest" and lines[-1] == "success"
    assert any(line.startswith(f"pulling {digest[:12]}: 100% of") for line in lines)
    assert [str(known) for known in store.names()] == [name]
    assert said("show", name, store=store)["architecture"] == "llama"


def test_pull_writes_one_json_object_a_line(registry, store):
    result = run("pull", f"ollama://{registry.host}/library/tiny", "--json", store=store)
    steps = [json.loads(line) for line in result.stdout.splitlines()]
    layer = registry.manifest.layers[0]
    assert steps[0] == {"status": "pulling manifest"}
    assert [step["completed"] for step in steps if step.get("digest")][-1] == layer.size
    assert steps[-1]["pulled"] == f"{registry.host}/library/tiny:latest"
    assert Path(steps[-1]["files"][0]).stat().st_size == layer.size
    assert result.stderr == ""


def test_an_absent_model_is_one_line(registry, store):
    result = run("pull", f"{registry.host}/library/nobody", status=1, store=store)
    assert "no such model" in result.stderr.splitlines()[-1]
    assert result.stderr.splitlines()[-1].startswith("caravan: ")
    assert "Traceback" not in result.output


def test_a_failed_pull_does_not_stop_the_others(registry, store):
    tiny, nobody = (f"{registry.host}/library/{name}:latest" for name in ("tiny", "nobody"))
    result = run("pull", nobody, "./a/path", tiny, status=1, store=store)
    assert [str(name) for name in store.names()] == [tiny]
    errors = [line for line in result.stderr.splitlines() if line.startswith("caravan: ")]
    assert "no such model" in errors[0] and "is a path" in errors[1]
    result = run("pull", nobody, tiny, "--json", status=1, store=store)
    steps = [json.loads(line) for line in result.stdout.splitlines()]
    assert ["no such model" in step["error"] for step in steps if "error" in step] == [True]
    assert steps[-1]["pulled"] == tiny and result.stderr == ""


def interrupted(registry: Registry, store: Store, name: str) -> tuple[int, str, str]:
    """Exit status, output and errors of a pull that is interrupted once the server stalls.

    The server goes on stalling until the pull has ended.
    """
    environment = {**os.environ, "CARAVAN_MODELS": str(store.root)}
    with subprocess.Popen(
        [sys.executable, "-c", WAITING, "pull", name],
        cwd=ROOT,
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    ) as process:
        assert registry.stalled.wait(HANG_S)
        process.send_signal(signal.SIGINT)
        try:
            output, errors = process.communicate(timeout=HANG_S)
        finally:
            process.kill()
            registry.go_on.set()
    return process.returncode, output, errors


def test_a_silent_server_does_not_delay_an_interrupt(registry, store):
    registry.silent = True
    status, output, _ = interrupted(registry, store, f"{registry.host}/library/tiny")
    assert status == 130 and output == ""


def test_an_interrupted_pull_ends_quietly_and_resumes_later(registry, store):
    registry.stall = True
    name = f"{registry.host}/library/tiny"
    status, output, errors = interrupted(registry, store, name)
    assert status == 130
    assert output == "" and "Traceback" not in errors
    assert "` resumes" in errors
    partial = [path for path in (store.root / "blobs").iterdir() if path.name.endswith(PARTIAL)]
    assert len(partial) == 1 and store.names() == []
    registry.stall = False
    run("pull", name, store=store)
    (model,) = store.names()
    assert said("verify", store=store) == [{"name": str(model), "valid": True, "damaged": []}]


def test_an_update_frees_the_files_of_the_old_version_after_a_day(registry, store, monkeypatch):
    name = f"{registry.host}/library/tiny"
    old = store.blob(put(store, name, {"model": b"the old version"}).layers[0].digest)
    interrupted = store.temporary()
    interrupted.write_bytes(b"x" * 5000)
    run("pull", name, store=store)
    assert old.exists() and interrupted.exists()
    monkeypatch.setattr(Store, "_changed_at", lambda self, path: 0.0)
    freed = sum(path.stat().st_blocks * 512 for path in (old, interrupted))
    result = run("pull", name, store=store)
    assert result.stdout.endswith(f"\n{freed / 1000:.1f} kB of files that no model uses freed\n")
    assert not old.exists() and not interrupted.exists()


def test_pull_downloads_what_verify_removed(registry, store):
    name = f"{registry.host}/library/tiny:latest"
    run("pull", name, store=store)
    blob = store.blob(registry.manifest.layers[0].digest)
    damaged = bytearray(blob.read_bytes())
    damaged[-1] ^= 1
    blob.write_bytes(damaged)
    run("verify", name, "--repair", status=1, store=store)
    run("pull", name, store=store)
    assert said("verify", name, store=store)[0]["valid"] is True


def test_names_without_a_scheme_belong_to_ollamas_registry(store, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    name = ModelName("registry.ollama.ai", "library", "llama3.2", "1b")
    assert remote_source("llama3.2:1b", store) == RegistrySource(name)
    assert remote_source("hf://org/repo:q4_0", store) == HubSource(
        "org", "repo", quantization="Q4_0"
    )
    (tmp_path / "model.gguf").write_bytes(b"")
    for path in ("model.gguf", "./nowhere.gguf"):
        with pytest.raises(CaravanError, match="is a path"):
            remote_source(path, store)


def test_serve_pulls_a_model_that_the_store_lacks(registry, store):
    given = {"port": None, "listen": None, "context": None}
    for _ in range(2):
        config = config_of([f"{registry.host}/library/tiny"], given, store, {})
        (served,) = config["applications"][0]["args"]["models"]
        assert served["name"] == "tiny"
        assert served["source"] == f"ollama://{registry.host}/library/tiny:latest"
        assert len(registry.ranges) == 1, "one download"
    assert store.names()


def test_a_model_of_the_hub_is_pulled_again_by_the_name_that_list_shows(store):
    source = HubSource("org", "repo", file="deep/model.gguf", revision="main")
    manifest = put(store, str(source.name), {"model": b"1"}, annotations={SOURCE: str(source)})
    assert manifest.annotations[SOURCE] == str(source)
    assert remote_source(str(source.name), store) == source
    with pytest.raises(CaravanError, match="hf://"):
        remote_source("huggingface.co/org/other:latest", store)


def test_bars_show_each_blob_and_the_total():
    screen = io.StringIO()
    console = Console(file=screen, force_terminal=True, width=120)
    with bars_on(console) as bars:
        bars(PullProgress("pulling manifest"))
        bars(PullProgress("pulling aaa", "sha256:a", 3_000_000, 3_000_000))
        bars(PullProgress("pulling bbb", "sha256:b", 1_000_000, 500_000))
    last = screen.getvalue().rpartition("total")[2]
    assert "pulling manifest" in screen.getvalue()
    assert "3.5/4.0 MB" in last.partition("pulling aaa")[0]
    assert "0.5/1.0 MB" in last.partition("pulling bbb")[2]


def test_complete_bars_are_hidden_if_there_are_many():
    screen = io.StringIO()
    with bars_on(Console(file=screen, force_terminal=True, width=120)) as bars:
        for number in range(100):
            bars(PullProgress(f"pulling n{number}", f"sha256:{number}", 10, 10))
    last = screen.getvalue().rpartition("total")[2]
    assert last.count("pulling n") == MAX_BARS
    assert "pulling n99" in last and "pulling n0 " not in last


def test_steps_between_the_first_and_the_last_are_limited():
    reported = []
    steps = StepWriter(reported.append, every_s=3600)
    for completed in range(0, 101, 10):
        steps(PullProgress("pulling aaa", "sha256:a", 100, completed))
    steps(PullProgress("success"))
    assert [(step.status, step.completed) for step in reported] == [
        ("pulling aaa", 0),
        ("pulling aaa", 100),
        ("success", 0),
    ]


def ollama_store(folder: Path, models: dict[str, bytes]) -> Path:
    """A folder in Ollama's layout, which is that of our store."""
    other = Store(folder)
    for name, content in models.items():
        put(other, name, {"model": content})
    return folder


def test_import_does_not_copy(tiny, store, tmp_path):
    folder = ollama_store(tmp_path / "ollama", {"one": tiny.read_bytes(), "two": b"2"})
    result = run("import", folder, "one", store=store)
    assert result.stdout == "one:latest\n"
    (row,) = said("list", store=store)
    assert row["name"] == "one:latest"
    (blob,) = row["files"]
    assert Path(blob).samefile(folder / "blobs" / Path(blob).name)


def test_the_help_of_import_names_verify():
    said_there = " ".join(run("import", "--help").stdout.split())
    assert "`caravan verify` compares them with their digests" in said_there


def test_import_finds_ollamas_own_folder(store, tmp_path, monkeypatch):
    folder = ollama_store(tmp_path / "ollama", {"one": b"1", "two": b"2"})
    monkeypatch.setenv("OLLAMA_MODELS", str(folder))
    result = run("import", "--json", store=store)
    lines = [json.loads(line) for line in result.stdout.splitlines()]
    assert [line["imported"] for line in lines if "imported" in line] == [
        "one:latest",
        "two:latest",
    ]


@pytest.fixture
def both_folders(tmp_path, monkeypatch) -> tuple[Path, Path]:
    """The user's own folder of Ollama, and that of its service."""
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.delenv("OLLAMA_MODELS", raising=False)
    service = tmp_path / "share" / "ollama" / "models"
    monkeypatch.setattr("serve_app.cli.imports.SERVICE_FOLDER", service)
    own = ollama_store(tmp_path / ".ollama" / "models", {"one": b"1"})
    return own, ollama_store(service, {"two": b"2"})


def test_import_skips_a_folder_that_cannot_be_read(store, both_folders, monkeypatch):
    deny(monkeypatch, both_folders[1].parent)
    result = run("import", store=store)
    assert result.stdout == "one:latest\n"
    assert f"skipped: {both_folders[1]}: this user cannot read it." in result.stderr
    assert run("import", "one", store=store).stdout == "one:latest\n"
    refused = run("import", "two", status=1, store=store).stderr.splitlines()[-1]
    assert "has no model two:latest" in refused and "cannot read it" in refused


def test_import_of_no_readable_folder_is_an_error(store, both_folders, monkeypatch):
    for folder in both_folders:
        deny(monkeypatch, folder)
    result = run("import", status=1, store=store)
    assert result.stderr.count("this user cannot read it") == 2
    assert result.stderr.startswith("caravan: ")


def test_import_without_ollama_is_one_line(store, tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.delenv("OLLAMA_MODELS", raising=False)
    monkeypatch.setattr("serve_app.cli.imports.SERVICE_FOLDER", tmp_path / "service")
    result = run("import", status=1, store=store)
    assert len(result.stderr.splitlines()) == 1 and "name Ollama's folder" in result.stderr


def test_an_unwritable_store_is_one_line(tmp_path):
    folder = ollama_store(tmp_path / "ollama", {"one": b"1"})
    (tmp_path / "file").write_bytes(b"no folder")
    result = run("import", folder, "one", status=1, store=Store(tmp_path / "file" / "store"))
    assert result.stderr.splitlines()[-1].startswith(f"caravan: {tmp_path}/file/store")
