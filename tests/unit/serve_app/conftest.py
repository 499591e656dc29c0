"""Events of the transport for which tests wait."""

import pytest

from serve_app.transport.connection import FramedConnection
from serve_app.transport.wire import Heartbeat


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
