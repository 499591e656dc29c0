"""A checkpoint that several modules convert."""

from pathlib import Path

import pytest

from tests.tiny_models import write_tiny_folder
from tests.unit.model_zoo.convert.checkpoint_changes import TINY_LLAMA, copy


@pytest.fixture(scope="package")
def folder(tmp_path_factory) -> Path:
    """A tiny llama; tests must not change it."""
    path = tmp_path_factory.mktemp("checkpoint") / "Tiny-1B"
    write_tiny_folder(path, TINY_LLAMA)
    return path


@pytest.fixture
def copied(folder, tmp_path) -> Path:
    """A copy that a test may change."""
    return copy(folder, tmp_path / "Tiny-1B")
