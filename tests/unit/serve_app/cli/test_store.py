"""`caravan list`, `rm` and `verify` on a store that the tests fill."""

import json

import gguf
import pytest

from model_zoo.gguf.cursor import Cursor
from model_zoo.gguf.reader import GGUFFile
from model_zoo.store.manifest import ManifestLayer
from model_zoo.store.model_name import ModelName
from model_zoo.store.store import Store
from tests.denied_access import deny
from tests.tiny_models import write_tiny_llama
from tests.unit.serve_app.cli.cli_runs import blob, put, run, said


@pytest.fixture(scope="module")
def tiny(tmp_path_factory) -> bytes:
    path = tmp_path_factory.mktemp("models") / "tiny.gguf"
    write_tiny_llama(path, type="Q8_0")
    return path.read_bytes()


def test_list_shows_facts_of_headers_and_manifests(tiny, store):
    manifest = put(store, "tiny:small", {"model": tiny, "license": b"free"})
    (row,) = said("list", store=store)
    reader = gguf.GGUFReader(row["files"][0])
    assert row["name"] == "tiny:small"
    assert row["architecture"] == reader.get_field("general.architecture").contents()
    assert row["quantization"] == "Q8_0"
    assert row["bytes"] == len(tiny) + len(b"free")
    assert row["blobs"] == [layer.digest for layer in manifest.blobs]
    assert row["error"] is None
    shown = run("list", store=store).stdout
    assert "tiny:small" in shown and "llama" in shown and "Q8_0" in shown
    assert row["digest"].removeprefix("sha256:")[:12] in shown


def test_list_does_not_read_vocabularies(tiny, store, monkeypatch):
    put(store, "tiny", {"model": tiny})
    read: list[bool] = []
    strings = Cursor.strings

    def watched(cursor: Cursor, count: int, thing: str, *, wanted: bool = True) -> list[str]:
        read.append(wanted)
        return strings(cursor, count, thing, wanted=wanted)

    monkeypatch.setattr(Cursor, "strings", watched)
    assert said("list", store=store)[0]["quantization"] == "Q8_0"
    assert read and not any(read)


def test_list_shows_a_damaged_model_among_the_others(tiny, store):
    put(store, "whole", {"model": tiny})
    blob(store, put(store, "hollow", {"model": b"GGUF and nothing"}))
    blob(store, put(store, "gone", {"model": b"gone"})).unlink()
    rows = {row["name"]: row for row in said("list", store=store)}
    assert rows["whole:latest"]["error"] is None
    assert "GGUF version" in rows["hollow:latest"]["error"]
    assert "missing" in rows["gone:latest"]["error"]
    result = run("list", store=store)
    assert len(result.stdout.splitlines()) == 4
    assert "gone:latest: " in result.stderr


def test_list_of_an_empty_store_is_an_empty_list(store):
    store.root.mkdir()
    assert said("list", store=store) == []
    assert f"The store {store.root} is empty" in run("list", store=store).stderr


def test_list_says_that_the_store_does_not_exist(store):
    assert said("list", store=store) == []
    assert f"The store {store.root} does not exist" in run("list", store=store).stderr


def test_list_says_that_the_store_cannot_be_read(store, monkeypatch):
    put(store, "one", {"model": b"1"})
    deny(monkeypatch, store.root)
    result = run("list", status=1, store=store)
    assert result.stderr == f"caravan: {store.root}/manifests: cannot read: Permission denied.\n"


def test_rm_frees_blobs_that_no_other_model_uses(tiny, store):
    put(store, "one", {"model": tiny, "license": b"of one"})
    kept = put(store, "two", {"model": tiny})
    removed = {"removed": "one:latest", "freed_bytes": 6, "in_use_bytes": 0}
    assert said("rm", "one", store=store) == removed
    assert blob(store, kept).is_file()
    assert (
        f"two:latest: removed, {len(tiny) / 1000:.1f} kB freed"
        in run("rm", "two", store=store).stdout
    )
    assert store.names() == []
    assert not blob(store, kept).exists()


def test_rm_leaves_files_that_a_process_maps(tiny, store):
    kept = blob(store, put(store, "one", {"model": tiny, "license": b"of one"}))
    mapped = GGUFFile.open(kept)
    size = f"{len(tiny) / 1000:.1f} kB"
    said = run("rm", "one", store=store).stdout
    assert said == f"one:latest: removed, 6 bytes freed; {size} are in use and removed later\n"
    assert mapped.size_bytes == kept.stat().st_size


def test_rm_frees_files_that_no_model_used_for_a_day(store, monkeypatch):
    put(store, "one", {"model": b"old"})
    old = blob(store, put(store, "one", {"model": b"new"}))
    put(store, "one", {"model": b"newer"})
    monkeypatch.setattr(Store, "_changed_at", lambda self, path: 0.0)
    lines = run("rm", "one", "--json", store=store).stdout.splitlines()
    assert json.loads(lines[1])["unused_freed_bytes"] > 0 and not old.exists()
    assert [*(store.root / "blobs").iterdir()] == []


def test_rm_removes_a_model_beside_a_damaged_one(store):
    put(store, "one", {"model": b"1"})
    put(store, "two", {"model": b"2"})
    store.manifest_path(ModelName.parse("two")).write_text("{")
    result = run("rm", "one", store=store)
    assert result.stdout == "one:latest: removed, 0 bytes freed\n"
    assert "Unused files are not removed" in result.stderr and "manifest" in result.stderr


def test_rm_removes_the_others_if_one_is_absent(store):
    put(store, "one", {"model": b"1"})
    put(store, "two", {"model": b"2"})
    result = run("rm", "one", "nobody", "two", status=1, store=store)
    assert store.names() == []
    assert result.stderr.splitlines() == [
        f"caravan: The store {store.root} has no model nobody:latest."
    ]


def test_rm_writes_errors_as_json_among_its_output(tiny, store):
    put(store, "here", {"model": tiny})
    result = run("rm", "nobody", "a:b:c", "here", "--json", status=1, store=store)
    lines = [json.loads(line) for line in result.stdout.splitlines()]
    assert "nobody:latest" in lines[0]["error"] and "b:c" in lines[1]["error"]
    assert lines[2]["removed"] == "here:latest" and store.names() == []


def test_ls_is_list(tiny, store):
    put(store, "tiny", {"model": tiny})
    assert run("ls", store=store).stdout == run("list", store=store).stdout


def test_verify_finds_nothing_in_a_sound_store(store):
    put(store, "one", {"model": b"1", "license": b"free"})
    assert said("verify", store=store) == [{"name": "one:latest", "valid": True, "damaged": []}]
    assert run("verify", "one", store=store).stdout == "one:latest: valid\n"


def test_verify_names_the_damaged_blob_and_fails(store):
    sound = put(store, "sound", {"model": b"sound"})
    manifest = put(store, "bad", {"model": b"as it was", "license": b"free"})
    blob(store, manifest).write_bytes(b"as it is.")
    result = run("verify", "--json", status=1, store=store)
    rows = {row["name"]: row for row in json.loads(result.stdout)}
    assert rows["sound:latest"]["valid"] is True
    (damage,) = rows["bad:latest"]["damaged"]
    assert damage["digest"] == manifest.of_kind("model")[0].digest
    assert damage["removed"] is False
    assert blob(store, manifest).is_file() and blob(store, sound).is_file()
    assert run("verify", "sound", store=store).stdout == "sound:latest: valid\n"


def test_verify_distinguishes_truncated_and_missing_blobs(store):
    cut = put(store, "cut", {"model": b"a longer one"})
    gone = put(store, "gone", {"model": b"gone"})
    blob(store, cut).write_bytes(b"a lon")
    blob(store, gone).unlink()
    shown = run("verify", status=1, store=store).stdout
    assert "has 5 bytes, not 12" in shown
    assert "is missing" in shown


def test_verify_repair_removes_only_damaged_blobs(store):
    manifest = put(store, "bad", {"model": b"as it was", "license": b"free"})
    blob(store, manifest).write_bytes(b"as it is.")
    assert "removed" in run("verify", "bad", "--repair", status=1, store=store).stdout
    assert not blob(store, manifest).exists()
    assert blob(store, manifest, "license").is_file()
    assert store.names() == [ModelName.parse("bad")]


def test_verify_repair_does_not_claim_to_remove_a_repaired_blob(store, monkeypatch):
    manifest = put(store, "bad", {"model": b"as it was"})
    damaged = blob(store, manifest)
    damaged.write_bytes(b"as it is.")
    discard = Store.discard

    def repaired_before(store: Store, layer: ManifestLayer) -> bool:
        damaged.write_bytes(b"as it was")
        return discard(store, layer)

    monkeypatch.setattr(Store, "discard", repaired_before)
    assert "removed" not in run("verify", "bad", "--repair", status=1, store=store).stdout
    assert damaged.read_bytes() == b"as it was"


def test_verify_reports_an_unreadable_manifest(store):
    put(store, "bad", {"model": b"1"})
    (path,) = (store.root / "manifests").glob("*/*/*/*")
    path.write_bytes(b"{")
    result = run("verify", status=1, store=store)
    assert "bad:latest: " in result.stdout and "manifest" in result.stdout


def test_verify_refuses_an_unknown_name(store):
    result = run("verify", "nobody", status=1, store=store)
    assert "nobody:latest" in result.stdout
