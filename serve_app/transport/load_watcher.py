"""Subscribes to a replica's load reports."""

import asyncio
import contextlib
from collections.abc import AsyncGenerator, Callable
from contextlib import aclosing

from serve_app.transport import wire
from serve_app.transport.client import SILENCE_S
from serve_app.transport.pauses import Pauses
from serve_app.transport.sockets import connect

FIRST_PAUSE_S = 0.1
LONGEST_PAUSE_S = 2.0


class LoadWatcher:
    """Subscribes to one replica in the running loop until closed. Reconnects after a loss.

    `report`: called with each report. `lost`: called when the subscription breaks; the next report
    ends that.
    """

    def __init__(
        self,
        address: wire.Address,
        report: Callable[[wire.LoadReport], None],
        lost: Callable[[], None],
        *,
        every_s: float,
    ) -> None:
        self._address = address
        self._report, self._lost = report, lost
        self.every_s = every_s
        self._watching = asyncio.create_task(self._watch())

    def close(self) -> None:
        self._watching.cancel()

    async def _watch(self) -> None:
        pauses = Pauses(FIRST_PAUSE_S, LONGEST_PAUSE_S)
        while True:
            received = False
            with contextlib.suppress(wire.ConnectionLost, wire.WireError):
                async with aclosing(self._reports()) as reports:
                    async for report in reports:
                        received = True
                        self._report(report)
            self._lost()
            if received:
                pauses.reset()
            await asyncio.sleep(pauses.take())

    async def _reports(self) -> AsyncGenerator[wire.LoadReport, None]:
        """Reads reports until the replica stops."""
        connection = await connect(self._address)
        try:
            connection.send(wire.Watch(self.every_s))
            with connection.silence_limit(SILENCE_S):
                while not isinstance(message := await connection.receive(), wire.Draining):
                    if isinstance(message, wire.LoadReport):
                        yield message
                    elif not isinstance(message, wire.Heartbeat):
                        raise wire.WireError(
                            f"Expected LoadReport, received {type(message).__name__}."
                        )
        finally:
            connection.close()
