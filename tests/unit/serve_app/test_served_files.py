"""Model files that are written while they are served."""

import json
import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from runtime.errors import EngineDeadError
from serve_app.config.settings import ModelSettings
from serve_app.replica.loading import load_replica
from serve_app.replica.served_files import ServedFiles, writers_beside_us
from tests.tiny_models import write_tiny_llama


@pytest.fixture
def path(tmp_path) -> Path:
    write_tiny_llama(tmp_path / "tiny.gguf", type="F16")
    return tmp_path / "tiny.gguf"


@pytest.fixture(autouse=True)
def store(tmp_path, monkeypatch) -> Path:
    monkeypatch.setenv("CARAVAN_MODELS", str(tmp_path / "store"))
    return tmp_path / "store"


def settings(path: Path) -> ModelSettings:
    sizes = {"context_tokens": 64, "max_sequences": 1}
    return ModelSettings(name="tiny", source=str(path), device="cpu", threads=1, **sizes)


def warnings(capsys) -> list[dict]:
    lines = [json.loads(each) for each in capsys.readouterr().err.splitlines() if each[:1] == "{"]
    return [line for line in lines if line["event"] == "model file may be written by others"]


def test_a_replica_whose_file_was_written_in_place_says_so_and_ends(path):
    other = path.read_bytes()
    replica = load_replica(settings(path))
    try:
        replica.check()
        with path.open("ab") as file:  # longer, so that nothing touches a page that is gone
            file.write(b"x")
        size = len(other)
        with pytest.raises(
            EngineDeadError,
            match=rf"tiny\.gguf was written in place .* {size:,} bytes and has {size + 1:,}",
        ):
            replica.check()
    finally:
        replica.close()


SHORTENED = """
import asyncio, os, sys
from runtime.engine.request import SamplingParams
from serve_app.replica.loading import load_replica
from serve_app.config.settings import ModelSettings
from serve_app.gateway.tasks import ChatTask, TokenIds

async def answer(replica):
    task = ChatTask("1", "tiny", TokenIds((0, 1, 2)), SamplingParams(temperature=0.0), 4)
    async for _ in replica.generate(task):
        pass

replica = load_replica(
    ModelSettings(
        name="tiny", source=sys.argv[1], device="cpu", threads=1, context_tokens=64, max_sequences=1
    )
)
os.truncate(sys.argv[1], 0)
asyncio.run(answer(replica))
"""


def test_the_end_of_a_process_whose_file_was_shortened_is_explained(path):
    ended = subprocess.run(
        [sys.executable, "-c", SHORTENED, str(path)], capture_output=True, text=True, check=False
    )
    assert ended.returncode == -signal.SIGBUS
    assert f"bus error in {path}: a file that is served was shortened in place" in ended.stderr


def test_a_rewrite_of_the_same_length_is_noticed(path):
    files = ServedFiles([path])
    files.check()
    os.utime(path, ns=(0, 0))
    with pytest.raises(EngineDeadError, match="written in place"):
        files.check()


def test_a_file_that_is_replaced_or_removed_goes_on(path):
    files = ServedFiles([path])
    shutil.copy(path, path.with_suffix(".new"))
    path.with_suffix(".new").replace(path)
    files.check()
    path.unlink()
    files.check()


@pytest.mark.parametrize(("mode", "writers"), [(0o646, ["everybody"]), (0o644, []), (0o444, [])])
def test_a_file_that_others_may_write_is_warned_of_at_the_start(path, capsys, mode, writers):
    path.chmod(mode)
    load_replica(settings(path)).close()
    warned = warnings(capsys)
    assert [line["writers"] for line in warned] == ([writers] if writers else [])
    for line in warned:
        assert (line["model"], line["file"]) == ("tiny", str(path)) and "renaming" in line["advice"]


def test_files_of_the_store_are_not_warned_of(path, store, capsys):
    store.mkdir()
    path.chmod(0o666)
    load_replica(settings(path.rename(store / path.name))).close()
    assert warnings(capsys) == []


def test_groups_and_owners_are_writers_unless_they_are_this_user(path, monkeypatch):
    path.chmod(0o664)
    own = os.stat(path)
    monkeypatch.setattr(os, "geteuid", lambda: own.st_uid + 12345)  # a user without an entry
    if own.st_uid:
        assert f"user {own.st_uid}" in writers_beside_us(path)
    assert f"group {own.st_gid}" in writers_beside_us(path)
