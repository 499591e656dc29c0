"""Events of the transport for which tests wait, and refusals that do not wait."""

from collections.abc import Iterator

import pytest

from serve_app.api import connections
from serve_app.transport.connection import FramedConnection
from serve_app.transport.wire import Heartbeat


@pytest.fixture(scope="package", autouse=True)
def undelayed() -> Iterator[None]:
    """Refusals of unread bodies, which are delayed by half a second and more, come at once."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(connections, "REFUSAL_DELAY_S", (0.0, 0.0))
        yield


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
