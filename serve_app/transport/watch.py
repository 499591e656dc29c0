"""Subscribes to a replica's load reports."""

import asyncio
import contextlib
from collections.abc import AsyncGenerator, Callable
from contextlib import aclosing
from dataclasses import dataclass

from serve_app.transport import handshake, wire
from serve_app.transport.sockets import connected_stream

CONNECT_TIMEOUT_S = 5.0
FIRST_PAUSE_S = 0.1
LONGEST_PAUSE_S = 2.0
# Beats come every second. Longer silences than this mean that the other side is gone.
SILENCE_S = 10.0


@dataclass(frozen=True, slots=True)
class Listener:
    """What to do with what is heard. `lost`: nothing comes for now; `report` ends that."""

    report: Callable[[wire.Report], None]
    lost: Callable[[], None]


class Watcher:
    """Watches one replica from the running loop until closed; a broken connection is mended."""

    def __init__(self, address: wire.Address, listener: Listener, *, every_s: float) -> None:
        self._address = address
        self._listener = listener
        self._every_s = every_s
        self._watching = asyncio.create_task(self._watch_on())

    def close(self) -> None:
        self._watching.cancel()

    async def _watch_on(self) -> None:
        pause_s = FIRST_PAUSE_S
        while True:
            heard = False
            with contextlib.suppress(OSError, EOFError, TimeoutError, wire.WireError):
                async with aclosing(self._reports()) as reports:
                    async for report in reports:
                        heard = True
                        self._listener.report(report)
            self._listener.lost()
            pause_s = FIRST_PAUSE_S if heard else min(2 * pause_s, LONGEST_PAUSE_S)
            await asyncio.sleep(pause_s)

    async def _reports(self) -> AsyncGenerator[wire.Report, None]:
        """Until the replica leaves. Raises what ends the connection."""
        reader, writer = await connected_stream(
            self._address.host, self._address.port, timeout_s=CONNECT_TIMEOUT_S
        )
        try:
            send, receive = wire.greetings(reader, writer)
            await handshake.prove(send, receive, token=self._address.token, purpose=wire.PURPOSE)
            writer.write(wire.frame(wire.Watch(self._every_s)))
            while True:
                async with asyncio.timeout(SILENCE_S):
                    message = await wire.read_message(reader, wire.MAX_TOLD_BYTES)
                if not isinstance(message, wire.Report):
                    return
                yield message
        finally:
            writer.close()
