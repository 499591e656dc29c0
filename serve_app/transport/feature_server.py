"""The encoder's end of the stream of images and features: one image at a time per connection."""

import asyncio
import logging
import secrets
import socket
from collections.abc import Awaitable, Iterable
from typing import Any, TypeVar

import torch
from torch import Tensor

from runtime import tls
from serve_app.transport import wire
from serve_app.transport.client import ConnectionLost
from serve_app.transport.features import EncodeRequest, SendPixels, raw, telling
from serve_app.transport.handshake import HalfOpen
from serve_app.transport.line import Line
from serve_app.transport.sockets import accept_all, listening_socket
from serve_app.vision.encoder import EncoderReplica

PATIENCE_S = 30.0

logger = logging.getLogger(__name__)

T = TypeVar("T")


class FeatureServer:
    """Serves the features of `encoder` to callers that know its token.

    A caller that leaves is no longer waited for. `patience_s`: how long one may take to bring
    pixels, or to read features, without anything moving.
    """

    def __init__(self, encoder: EncoderReplica, *, patience_s: float = PATIENCE_S) -> None:
        self._encoder = encoder
        self._patience_s = patience_s
        self._token = secrets.token_hex(32)
        self._tls = tls.context_for("listener")
        self._callers: set[asyncio.Task[None]] = set()
        self._half_open = HalfOpen()
        self._answering: set[asyncio.Task[None]] = set()
        self._accepting: asyncio.Task[None] | None = None
        self._closing = False

    async def start(self, host: str, port: int = 0) -> wire.Address:
        listening = listening_socket(host, port)
        self._accepting = asyncio.create_task(accept_all(listening, self._accept))
        return wire.Address(host, listening.getsockname()[1], self._token)

    async def close(self, *, drain_s: float) -> None:
        """Accept nothing new, let running answers end for at most `drain_s`, then cut them."""
        self._closing = True
        if self._accepting is not None:
            await _ended([self._accepting])
        await _ended(self._callers - self._answering)
        if self._answering:
            await asyncio.wait(self._answering, timeout=drain_s)
        await _ended(self._callers)

    def _accept(self, connected: socket.socket) -> None:
        caller = asyncio.create_task(self._serve(connected))
        self._callers.add(caller)
        caller.add_done_callback(self._callers.discard)

    async def _serve(self, connected: socket.socket) -> None:
        line = Line(connected, patience_s=self._patience_s)
        try:
            with self._half_open.entered():
                await line.admit(self._token, self._tls)
            while not self._closing:
                await self._answer(line, await line.receive(idle=True))
        except (ConnectionLost, TimeoutError):
            pass  # the caller left, or did not finish the handshake
        except wire.WireError as error:
            logger.warning("connection for features refused: %s", error)
        finally:
            line.close()

    async def _answer(self, line: Line, asked: object) -> None:
        if not isinstance(asked, EncodeRequest):
            raise wire.WireError(f"{type(asked).__name__} where AskFeatures was due.")
        task = asyncio.current_task()
        assert task is not None
        self._answering.add(task)
        try:
            await self._told(line, await self._features(line, asked))
        except (ConnectionLost, wire.WireError):
            raise
        except Exception as error:
            failed = wire.failed(error)
            if failed.kind == wire.CaravanError.__name__:
                logger.exception("an image could not be encoded")
            await line.send(failed)
        finally:
            self._answering.discard(task)

    async def _features(self, line: Line, asked: EncodeRequest) -> Tensor:
        with self._encoder.visit(asked) as visit:
            known = await self._beside(line, self._encoder.known(visit))
            if known is not None:
                return known
            pixels = torch.empty(asked.shape, dtype=torch.float32)
            await line.send(SendPixels())
            await line.receive_into(raw(pixels))
            return await self._beside(line, self._encoder.encoded(visit, pixels))

    async def _beside(self, line: Line, work: Awaitable[T]) -> T:
        """What `work` gives. Meanwhile the caller hears that the encoder lives; if it leaves, that
        ends the work."""
        working, left = asyncio.ensure_future(work), asyncio.create_task(line.left())
        try:
            while not working.done():
                await asyncio.wait(
                    {working, left},
                    timeout=wire.HEARTBEAT_S,
                    return_when=asyncio.FIRST_COMPLETED,
                )
                if working.done():
                    break
                if left.done():
                    raise ConnectionLost("The caller has left.")
                self._encoder.check()
                await line.send(wire.Heartbeat())
            return await working
        finally:
            await _ended([working, left])

    async def _told(self, line: Line, features: Tensor) -> None:
        async with self._encoder.draining:
            await line.send(telling(features))
            await line.send_bytes(raw(features))


async def _ended(tasks: Iterable[asyncio.Future[Any]]) -> None:
    """Cancel them and wait until they are over, however they end."""
    over = set(tasks)
    for task in over:
        task.cancel()
    if over:
        await asyncio.wait(over)
    for task in over:
        if not task.cancelled():
            task.exception()  # marks it as seen
