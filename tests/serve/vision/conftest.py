"""The application with vision models, for the tests of this folder."""

from collections.abc import Iterator

import pytest

from tests.loopback import Server
from tests.serve.application import Application
from tests.serve.vision.application import picture_server, running


@pytest.fixture(scope="package")
def pictures() -> Iterator[Server]:
    with picture_server() as server:
        yield server


@pytest.fixture(scope="package")
def url(
    application: Application, pictures: Server, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[str]:
    with running(application, pictures, tmp_path_factory.mktemp("models")) as url:
        yield url
