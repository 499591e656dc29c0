"""Transfer of image features: the encoder's request handler, and the model replica's client."""

import asyncio
import time
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext

import torch
from torch import Tensor

from runtime.vision.encoder import ImageLimits, PreparedImage
from serve_app.logs import get_logger
from serve_app.telemetry.request_context import begin_work
from serve_app.telemetry.spans import Span, SpanKind, Spans
from serve_app.transport import wire
from serve_app.transport.client import SILENCE_S, StreamClient
from serve_app.transport.connection import FramedConnection
from serve_app.transport.stream_server import StreamServer
from serve_app.transport.wire import WireError
from serve_app.vision.encoder_replica import EncoderReplica

RECEIVED_AT_ONCE = 2
STALL_S = 30.0
DTYPES: dict[wire.FeatureType, torch.dtype] = {
    "bfloat16": torch.bfloat16,
    "float16": torch.float16,
}
FEATURE_BYTES = torch.bfloat16.itemsize

log = get_logger()


def feature_server(
    encoder: EncoderReplica,
    *,
    stall_s: float = STALL_S,
    observe: Callable[[float], None] = lambda seconds: None,
    spans: Spans | None = None,
) -> StreamServer:
    """Serves the features of `encoder`, which sends no heartbeats while it has stalled. `stall_s`:
    maximum time without progress while a caller sends pixels or reads features. `observe`: called
    with the seconds from each request to its features. `spans`: creates spans of images."""

    async def encode(request: wire.EncodeRequest, connection: FramedConnection) -> None:
        async def receive_pixels() -> Tensor:
            pixels = torch.empty(request.shape, dtype=torch.float32)
            connection.send(wire.SendPixels())
            with connection.silence_limit(stall_s):
                await connection.receive_into(raw(pixels))
            return pixels

        begin_work(request.origin)
        begun = time.monotonic()
        with _image_span(spans, request):
            features = await encoder.features(request, receive_pixels)
        seconds = time.monotonic() - begun
        observe(seconds)
        log.debug("image encoded", rows=request.rows, seconds=round(seconds, 3))
        async with encoder.sending:
            connection.send(announcement(features))
            with connection.silence_limit(stall_s):
                await connection.send_bytes(raw(features))

    return StreamServer(
        {wire.EncodeRequest: encode},
        max_request_bytes=wire.MAX_ENCODE_REQUEST_BYTES,
        alive=lambda: not encoder.stalled,
    )


def _image_span(
    spans: Spans | None, request: wire.EncodeRequest
) -> AbstractContextManager[Span | None]:
    if spans is None:
        return nullcontext()
    return spans.span("encode image", SpanKind.SERVER, request.origin.traceparent)


class FeatureClient:
    """Requests features from encoders. `limits`: limits of the features. `tower`: digest of the
    file with the weights. `silence_s`: an encoder that sends nothing for this long counts as
    lost."""

    def __init__(
        self,
        limits: ImageLimits,
        *,
        tower: bytes,
        device: torch.device,
        silence_s: float = SILENCE_S,
    ) -> None:
        self._limits = limits
        self._tower = tower
        self._device = device
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None
        self._client = StreamClient(silence_s=silence_s)
        self._receiving = asyncio.Semaphore(RECEIVED_AT_ONCE)

    @property
    def workspace_bytes(self) -> int:
        """Temporary device memory of arriving features, in addition to the features themselves."""
        return RECEIVED_AT_ONCE * self._limits.rows * self._limits.width * FEATURE_BYTES

    async def features(
        self,
        address: wire.Address,
        image: PreparedImage,
        *,
        heard: Callable[[], None] = lambda: None,
    ) -> Tensor:
        """[rows, width] as `limits` say, on the device. `heard`: called for each message of the
        encoder, which sends heartbeats while the image waits or is encoded.

        Raises ConnectionLost, with `at_work` once the encoder has the pixels, or the encoder's own
        error.
        """
        shape = tuple(image.pixels.shape)
        async with self._client.exchange(address) as connection:
            connection.send(
                wire.EncodeRequest(
                    self._tower,
                    image.digest,
                    shape,
                    image.grid,
                    image.rows,
                    image.tenant,
                    image.origin,
                )
            )
            reply = await _reply(connection, heard)
            if isinstance(reply, wire.SendPixels):
                await connection.send_bytes(raw(image.pixels))
                connection.at_work = True
                reply = await _reply(connection, heard)
            return await self._received(connection, reply, image.rows)

    def close(self) -> None:
        self._client.close()

    async def _received(
        self, connection: FramedConnection, reply: wire.WireMessage, rows: int
    ) -> Tensor:
        if not isinstance(reply, wire.Features):
            raise WireError(f"Expected Features, received {type(reply).__name__}.")
        if (reply.rows, reply.width) != (rows, self._limits.width):
            raise WireError(
                f"Expected features [{rows:,}, {self._limits.width:,}], received "
                f"[{reply.rows:,}, {reply.width:,}]."
            )
        connection.pause_reading()
        async with self._receiving:
            connection.resume_reading()
            features = torch.empty(rows, self._limits.width, dtype=DTYPES[reply.dtype])
            await connection.receive_into(raw(features))
            return self._on_device(features)

    @torch.inference_mode()
    def _on_device(self, features: Tensor) -> Tensor:
        with torch.cuda.stream(self._stream):
            arrived = features.to(self._device).to(self._limits.dtype)
        if self._stream is not None:
            self._stream.synchronize()
        return arrived


def announcement(features: Tensor) -> wire.Features:
    """The message before the numbers of `features` [rows, width]."""
    (name,) = (name for name, dtype in DTYPES.items() if dtype is features.dtype)
    rows, width = features.shape
    return wire.Features(rows, width, name)


def raw(tensor: Tensor) -> memoryview:
    """The bytes of a contiguous tensor on the host, shared and not copied."""
    assert tensor.is_contiguous() and tensor.device.type == "cpu"
    return tensor.view(-1).view(torch.uint8).numpy().data


async def _reply(connection: FramedConnection, heard: Callable[[], None]) -> wire.WireMessage:
    """The next message other than heartbeats and `Draining`. Raises the encoder's error."""
    reply = await connection.receive()
    heard()
    while isinstance(reply, wire.Heartbeat | wire.Draining):
        reply = await connection.receive()
        heard()
    if isinstance(reply, wire.Failed):
        raise wire.error_of(reply)
    return reply
