"""The application with many models, for the tests of this folder."""

from collections.abc import Iterator
from pathlib import Path

import ollama
import pytest

from tests.loopback import Server
from tests.patience import HANG_S
from tests.serve.application import Application
from tests.serve.many.application import registry_server, running
from tests.tiny_models import write_tiny_llama


@pytest.fixture(scope="package")
def registry() -> Iterator[Server]:
    with registry_server() as server:
        yield server


@pytest.fixture(scope="package")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("tiny") / "tiny.gguf"
    write_tiny_llama(path, type="F16")
    return path


@pytest.fixture(scope="package")
def url(application: Application, registry: Server, tiny: Path) -> Iterator[str]:
    with running(application, registry, tiny) as url:
        yield url


@pytest.fixture
def client(url: str) -> ollama.Client:
    return ollama.Client(host=url, timeout=HANG_S)
