"""Model files that are written while they are served."""

import os
import shutil
from pathlib import Path

import pytest

from runtime.errors import EngineDeadError
from serve_app.replica.served_files import ServedFiles
from tests.tiny_models import write_tiny_llama
from tests.unit.serve_app.loaded_replicas import loaded


@pytest.fixture
def path(tmp_path) -> Path:
    write_tiny_llama(tmp_path / "tiny.gguf", type="F16")
    return tmp_path / "tiny.gguf"


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
