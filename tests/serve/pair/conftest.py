"""The application with two replicas, for the tests of this folder."""

from collections.abc import Iterator

import pytest

from tests.serve.application import Application, eventually
from tests.serve.pair.application import both_run, running


@pytest.fixture(scope="package")
def pair(application: Application) -> Iterator[str]:
    with running(application) as url:
        yield url


@pytest.fixture
def url(pair: str) -> str:
    """When both replicas run: the test before may have killed one."""
    eventually(both_run)
    return pair
