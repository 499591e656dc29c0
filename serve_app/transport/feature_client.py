"""The replica's end of the stream of images and features, with a pool of idle connections."""

import asyncio
import time
from collections import deque

import torch
from torch import Tensor

from runtime.vision.encoder import ImageLimits, PreparedImage
from serve_app.transport import wire
from serve_app.transport.client import ConnectionLost
from serve_app.transport.features import (
    DTYPES,
    EncodeRequest,
    Features,
    Message,
    SendPixels,
    raw,
)
from serve_app.transport.line import Line

IDLE_PER_ENCODER = 8
IDLE_S = 60.0
RECEIVED_AT_ONCE = 2
WIRE_BYTES = torch.bfloat16.itemsize
# Encoders give a sign of life every BEAT_S.
PATIENCE_S = 10.0


class LostAtWork(ConnectionLost):
    """The connection failed after the encoder had got the pixels."""


class FeatureClient:
    """Asks encoders for features. `limits`: of these; `tower`: the name of the weights' file.

    `patience_s`: an encoder that has been silent for so long is lost.
    """

    def __init__(
        self,
        limits: ImageLimits,
        *,
        tower: bytes,
        device: torch.device,
        patience_s: float = PATIENCE_S,
    ) -> None:
        self._limits = limits
        self._tower = tower
        self._device = device
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None
        self._patience_s = patience_s
        self._receiving = asyncio.Semaphore(RECEIVED_AT_ONCE)
        self._idle: dict[wire.Address, deque[tuple[float, Line]]] = {}

    @property
    def workspace_bytes(self) -> int:
        """What features take of the device, beside themselves, while they arrive."""
        return RECEIVED_AT_ONCE * self._limits.rows * self._limits.width * WIRE_BYTES

    async def features(self, address: wire.Address, image: PreparedImage) -> Tensor:
        """[rows, width] as `limits` say, on the device.

        Raises LostAtWork or ConnectionLost, or the encoder's own error.
        """
        line = self._pooled(address) or await self._opened(address)
        try:
            features = await self._asked(line, image)
        except BaseException as error:
            if isinstance(error, wire.CaravanError):
                self._keep(address, line)  # the encoder has answered; the connection is fine
            else:
                line.close()
            raise
        self._keep(address, line)
        return features

    def close(self) -> None:
        for lines in self._idle.values():
            for _, line in lines:
                line.close()
        self._idle.clear()

    async def _opened(self, address: wire.Address) -> Line:
        try:
            return await Line.open(address, patience_s=self._patience_s)
        except wire.WireError as error:
            raise ConnectionLost(str(error)) from error

    async def _asked(self, line: Line, image: PreparedImage) -> Tensor:
        asked = EncodeRequest(
            self._tower,
            image.digest,
            tuple(image.pixels.shape),
            image.grid,
            image.rows,
            image.tenant,
        )
        brought = False
        try:
            await line.send(asked)
            answer = await self._answer(line)
            if isinstance(answer, SendPixels):
                await line.send_bytes(raw(image.pixels))
                brought = True
                answer = await self._answer(line)
            return await self._received(line, answer, image.rows)
        except (ConnectionLost, wire.WireError) as error:
            raise (LostAtWork if brought else ConnectionLost)(str(error)) from error

    async def _answer(self, line: Line) -> Message:
        answer = await line.receive()
        while isinstance(answer, wire.Heartbeat):
            answer = await line.receive()
        if isinstance(answer, wire.Failed):
            raise wire.error_of(answer)
        return answer

    async def _received(self, line: Line, answer: Message, rows: int) -> Tensor:
        if not isinstance(answer, Features):
            raise wire.WireError(f"{type(answer).__name__} where Features were due.")
        if (answer.rows, answer.width) != (rows, self._limits.width):
            raise wire.WireError(
                f"Features of {answer.rows:,} x {answer.width:,} numbers where {rows:,} x "
                f"{self._limits.width:,} were due."
            )
        async with self._receiving:
            features = torch.empty(rows, self._limits.width, dtype=DTYPES[answer.dtype])
            await line.receive_into(raw(features))
            return self._arrived(features)

    @torch.inference_mode()
    def _arrived(self, features: Tensor) -> Tensor:
        with torch.cuda.stream(self._stream):
            arrived = features.to(self._device).to(self._limits.dtype)
        if self._stream is not None:
            self._stream.synchronize()
        return arrived

    def _pooled(self, address: wire.Address) -> Line | None:
        self._drop_stale()
        lines = self._idle.get(address, deque())
        while lines:
            _, line = lines.pop()
            if line.quiet:
                return line
            line.close()
        return None

    def _keep(self, address: wire.Address, line: Line) -> None:
        lines = self._idle.setdefault(address, deque())
        if len(lines) < IDLE_PER_ENCODER:
            lines.append((time.monotonic(), line))
        else:
            line.close()

    def _drop_stale(self) -> None:
        """Oldest stand first; an encoder that is gone leaves no entry behind."""
        begin = time.monotonic() - IDLE_S
        for address, lines in list(self._idle.items()):
            while lines and (lines[0][0] < begin or not lines[0][1].quiet):
                lines.popleft()[1].close()
            if not lines:
                del self._idle[address]
