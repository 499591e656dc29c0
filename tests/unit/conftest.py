"""Fixtures of several packages; this module is imported by all unit tests, so it imports little."""

import pytest

from model_zoo.store.store import Store
from tests.certificates import Authority, set_variables


@pytest.fixture
def store(tmp_path) -> Store:
    """An empty model store."""
    return Store(tmp_path / "store")


@pytest.fixture
def authority(tmp_path) -> Authority:
    return Authority(tmp_path)


@pytest.fixture
def secured(authority, monkeypatch) -> None:
    """This host uses TLS, with a certificate of the authority."""
    set_variables(monkeypatch, authority.environment())
