"""The demo model; events of the transport for which tests wait; what a test must not wait for or
leave to chance."""

import logging
from collections.abc import Iterator
from random import Random
from types import SimpleNamespace

import pytest

from serve_app.api import connections
from serve_app.config import options
from serve_app.replica.replica import ModelReplica
from serve_app.transport.connection import FramedConnection
from serve_app.transport.wire import Heartbeat
from tests.unit.serve_app.loaded_replicas import loaded


@pytest.fixture(scope="package", autouse=True)
def undelayed() -> Iterator[None]:
    """Refusals of unread bodies, which are delayed by half a second and more, come at once."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(connections, "REFUSAL_DELAY_S", (0.0, 0.0))
        yield


@pytest.fixture(autouse=True)
def loggers() -> Iterator[None]:
    """Deployments, which set levels and handlers of this project's loggers, leave them as they
    were."""
    packages = [logging.getLogger(name) for name in ("runtime", "model_zoo", "serve_app")]
    before = [(logger, logger.level, list(logger.handlers)) for logger in packages]
    yield
    for logger, level, handlers in before:
        logger.setLevel(level)
        logger.handlers[:] = handlers


@pytest.fixture(autouse=True)
def repeatable(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Requests without a seed draw the same ones each time that a test runs, so that a test of
    what they sample either always passes or never."""
    draw = Random(request.node.nodeid).randrange
    monkeypatch.setattr(options, "secrets", SimpleNamespace(randbelow=draw))


@pytest.fixture(scope="package")
def demo_replica() -> Iterator[ModelReplica]:
    """The demo model, for `ingress` and its clients in `fake_replicas.py`."""
    with loaded(context_tokens=768) as replica:
        yield replica


@pytest.fixture
def heartbeats(monkeypatch: pytest.MonkeyPatch) -> list[Heartbeat]:
    """All heartbeats that this process has sent."""
    sent: list[Heartbeat] = []
    send = FramedConnection.send

    def noting(connection: FramedConnection, message: object) -> None:
        send(connection, message)
        if isinstance(message, Heartbeat):
            sent.append(message)

    monkeypatch.setattr(FramedConnection, "send", noting)
    return sent
