"""Model files that are written while they are served."""

import json
import os
import shutil
from pathlib import Path

import pytest

from runtime.errors import EngineDeadError
from serve_app.replica.loading import load_replica
from serve_app.replica.served_files import ServedFiles, other_writers
from tests.tiny_models import write_tiny_llama
from tests.unit.serve_app.loaded_replicas import loaded, settings


@pytest.fixture
def path(tmp_path) -> Path:
    write_tiny_llama(tmp_path / "tiny.gguf", type="F16")
    return tmp_path / "tiny.gguf"


@pytest.fixture(autouse=True)
def store(tmp_path, monkeypatch) -> Path:
    monkeypatch.setenv("CARAVAN_MODELS", str(tmp_path / "store"))
    return tmp_path / "store"


def warnings(capsys) -> list[dict]:
    lines = [json.loads(each) for each in capsys.readouterr().err.splitlines() if each[:1] == "{"]
    return [line for line in lines if line["event"] == "model file may be written by others"]


def test_the_health_check_fails_after_a_write_in_place(path):
    with loaded(path) as replica:
        replica.check()
        size = path.stat().st_size
        with path.open("ab") as file:  # appended, so that no mapped page disappears
            file.write(b"x")
        with pytest.raises(
            EngineDeadError,
            match=rf"tiny\.gguf was written in place .* {size:,} bytes and has {size + 1:,}",
        ):
            replica.check()


def test_a_write_of_the_same_length_is_detected(path):
    files = ServedFiles([path])
    files.check()
    os.utime(path, ns=(0, 0))
    with pytest.raises(EngineDeadError, match="written in place"):
        files.check()


def test_a_replaced_or_removed_file_stays_healthy(path):
    files = ServedFiles([path])
    shutil.copy(path, path.with_suffix(".new"))
    path.with_suffix(".new").replace(path)
    files.check()
    path.unlink()
    files.check()


@pytest.mark.parametrize(("mode", "writers"), [(0o646, ["all users"]), (0o644, []), (0o444, [])])
def test_a_file_that_other_users_may_write_is_logged_at_the_start(path, capsys, mode, writers):
    path.chmod(mode)
    load_replica(settings(path)).close()
    logged = warnings(capsys)
    assert [line["writers"] for line in logged] == ([writers] if writers else [])
    for line in logged:
        assert (line["model"], line["file"]) == ("demo", str(path)) and "renaming" in line["advice"]


def test_files_of_the_store_are_not_logged(path, store, capsys):
    store.mkdir()
    path.chmod(0o666)
    load_replica(settings(path.rename(store / path.name))).close()
    assert warnings(capsys) == []


def test_foreign_owners_and_shared_groups_are_writers(path, monkeypatch):
    path.chmod(0o664)
    own = os.stat(path)
    monkeypatch.setattr(os, "geteuid", lambda: own.st_uid + 12345)  # a user without an entry
    if own.st_uid:
        assert f"user {own.st_uid}" in other_writers(path)
    assert f"group {own.st_gid}" in other_writers(path)
