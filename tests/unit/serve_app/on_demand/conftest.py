"""Fixtures of several modules: a clock, a small model, and a store that contains it."""

from pathlib import Path

import pytest

from model_zoo.store.store import Store
from tests.tiny_models import write_tiny_llama
from tests.unit.serve_app.cli.cli_runs import put
from tests.unit.serve_app.on_demand.fake_loader import FakeLoader
from tests.virtual_time import Clock


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
async def loader() -> FakeLoader:
    """Of three models, two of which fit a pool of 100 bytes."""
    return FakeLoader(a=(40, 50), b=(40, 50), c=(40, 50))


@pytest.fixture(scope="module")
def tiny(tmp_path_factory) -> bytes:
    path = tmp_path_factory.mktemp("tiny") / "tiny.gguf"
    write_tiny_llama(path, type="F16")
    return path.read_bytes()


@pytest.fixture
def root(tiny, tmp_path) -> Path:
    """The folder of a store with one model, `kept`."""
    put(Store(tmp_path / "store"), "kept", {"model": tiny})
    return tmp_path / "store"
