"""One vision tower that many model replicas share: images in, features out; independent of Ray."""

import asyncio
import contextlib
import math
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from runtime.engine.engine import engine_dead
from runtime.errors import CaravanError, ConfigurationError, GenerationFailedError, RequestError
from runtime.vision.encoder import (
    LocalEncoder,
    Pause,
    PreparedImage,
    VisionTower,
    no_pause,
)
from runtime.vision.feature_cache import FeatureStore
from serve_app.fair_gate import FairGate
from serve_app.transport.wire import EncodeRequest

CACHED_IMAGES = 16  # default cache size in images of the largest size
# Maximum number of replies being sent, whose features may have been evicted from the cache.
SENT_AT_ONCE = 8

ReceivePixels = Callable[[], Awaitable[Tensor]]


@dataclass(frozen=True, slots=True)
class EncoderStatistics:
    """The state of an encoder (the first field) and its counters since the start.

    `images_waiting`: requests without a reply yet. `images_known_total`: replies from the cache.
    `batches_total`: calls of the tower.
    """

    images_waiting: int
    images_encoded_total: int
    images_known_total: int
    batches_total: int


class _Transfer:
    """An image in transfer: one caller sends the pixels; others that request it wait for
    `ended`."""

    def __init__(self) -> None:
        self.ended = asyncio.Event()
        self.image: PreparedImage | None = None
        self.features: asyncio.Future[Tensor] = asyncio.get_running_loop().create_future()
        self.failure: Exception | None = None


class EncoderReplica:
    """Features by the image's digest: cached, or computed once the caller has sent the pixels.

    Simultaneous requests for one image share one transfer and one encoding. Pixels of at most two
    batches are held, the one in the tower and the next; other callers wait, and tenants are served
    in turn. `name`: digest of the file with the weights. `weight_bytes`, `first`: as of
    `LocalEncoder`.
    `stall_s`: see `stalled`, by `clock` in seconds. For one event loop.
    """

    def __init__(
        self,
        tower: VisionTower,
        *,
        name: bytes,
        device: torch.device,
        weight_bytes: int,
        cache_bytes: int | None = None,
        batch_images: int | None = None,
        first: PreparedImage | None = None,
        stall_s: float = 300.0,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._name = name
        self._tower = OutgoingTower(tower)
        self._encoder = LocalEncoder(
            self._tower,
            device=device,
            weight_bytes=weight_bytes,
            batch_images=batch_images,
            first=first,
            clock=clock,
        )
        self._most_pixels = tower.limits.pixel_elements
        check_cache(cache_bytes, tower)
        self._cache_bytes = cache_bytes or CACHED_IMAGES * self._largest_bytes
        self._store = FeatureStore(self._encoder, budget_bytes=self._cache_bytes, clock=clock)
        self._store.wake = self._wake
        self._places = 2 * self.batch_images
        self._room = FairGate(self._places)
        self.sending = asyncio.Semaphore(SENT_AT_ONCE)
        self._transfers: dict[bytes, _Transfer] = {}
        self._requests = self._known = 0
        self._stall_s, self._clock = stall_s, clock
        self._loop: asyncio.AbstractEventLoop | None = None

    @property
    def batch_images(self) -> int:
        return self._encoder.batch_images

    @property
    def weight_bytes(self) -> int:
        return self._encoder.weight_bytes

    @property
    def device_bytes(self) -> int:
        """Maximum bytes on the tower's device, without weights."""
        return self._encoder.workspace_bytes

    @property
    def host_bytes(self) -> int:
        """Maximum bytes on the host: received pixels, cached features, features being sent."""
        pixels = self._places * self._most_pixels * torch.float32.itemsize
        return pixels + self._cache_bytes + SENT_AT_ONCE * self._largest_bytes

    def warm_up(self) -> None:
        """Encodes a batch of the first image, which fails here if memory is insufficient."""
        self._encoder.warm_up()

    async def features(self, request: EncodeRequest, receive: ReceivePixels) -> Tensor:
        """The features [rows, width], 16 bits each, on the host. Cancelling it cancels work that no
        other request needs. `receive`: gets the pixels from the caller; called at most once.

        RequestError: the image does not suit this tower. GenerationFailedError: encoding this image
        fails. EngineDeadError: as from `check`.
        """
        self.check()
        self._refuse_unsuitable(request)
        self._loop = asyncio.get_running_loop()
        self._requests += 1
        try:
            while not self._store.ready(request.digest):
                transfer = self._transfers.get(request.digest)
                if transfer is None:
                    return await self._encoded(request, receive)
                await transfer.ended.wait()
                if transfer.failure is not None:
                    raise transfer.failure
            self._known += 1
            self._store.touch(request.digest)
            return self._store.lookup(request.digest)
        finally:
            self._requests -= 1

    async def _encoded(self, request: EncodeRequest, receive: ReceivePixels) -> Tensor:
        digest = request.digest
        transfer = self._transfers[digest] = _Transfer()
        try:
            async with self._room.place(request.tenant):
                pixels = await receive()
                if self._store.ready(digest):  # computed for a caller that has left since
                    return self._store.lookup(digest)
                transfer.image = PreparedImage(pixels, request.grid, digest, request.rows)
                self._provide()
                try:
                    return await transfer.features
                except Exception as error:
                    transfer.failure = error
                    raise
        finally:
            del self._transfers[digest]
            self._provide()
            transfer.ended.set()

    def check(self) -> None:
        """EngineDeadError: the device has failed, or encoding has stalled."""
        if self._tower.broken is not None:
            raise engine_dead(self._tower.broken)
        if self.stalled:
            raise engine_dead(f"no part of an image was encoded for {self._stall_s:.0f} seconds.")

    @property
    def stalled(self) -> bool:
        """Whether images wait and no part of one has been computed for `stall_s`."""
        since = self._store.waiting_since
        return since is not None and since < self._clock() - self._stall_s

    def statistics(self) -> EncoderStatistics:
        return EncoderStatistics(
            images_waiting=self._requests,
            images_encoded_total=self._store.encoded,
            images_known_total=self._known,
            batches_total=self._tower.batches,
        )

    def close(self) -> None:
        """Waits for the images that are being encoded."""
        self._store.close()

    @property
    def _largest_bytes(self) -> int:
        return self._tower.limits.rows * self._tower.limits.row_bytes

    def _refuse_unsuitable(self, request: EncodeRequest) -> None:
        if request.tower != self._name:
            raise RequestError(
                "The vision encoder has other weights than the image needs. Start model replicas "
                "and vision encoders from the same files."
            )
        pixels, limits = math.prod(request.shape), self._tower.limits
        if request.rows > limits.rows or pixels > self._most_pixels:
            raise RequestError(
                f"The image has {pixels:,} numbers and {request.rows:,} rows of features; the "
                f"vision encoder accepts {self._most_pixels:,} and {limits.rows:,}."
            )

    def _provide(self) -> None:
        transfers = self._transfers.values()
        self._store.provide(each.image for each in transfers if each.image is not None)

    def _wake(self) -> None:
        """Called by the encoder's thread. A closed loop has no waiting requests."""
        assert self._loop is not None
        with contextlib.suppress(RuntimeError):
            self._loop.call_soon_threadsafe(self._collect)

    def _collect(self) -> None:
        failures = self._store.collect()
        for digest, transfer in self._transfers.items():
            if transfer.image is None or transfer.features.done():
                continue
            if digest in failures:
                transfer.image = None  # not retried
                transfer.features.set_exception(self._failure(failures[digest]))
            elif self._store.ready(digest):
                transfer.features.set_result(self._store.lookup(digest))
        self._provide()

    def _failure(self, failure: CaravanError) -> Exception:
        broken = self._tower.broken
        return GenerationFailedError(str(failure)) if broken is None else engine_dead(broken)


class OutgoingTower:
    """A tower whose features are 16-bit and on the host, as they are cached and sent.

    16-bit features keep their type. float32 becomes bfloat16, which has the same range: features
    have outliers beyond that of float16. `broken`: why the device has failed.
    """

    def __init__(self, tower: VisionTower) -> None:
        self._tower = tower
        dtype = tower.limits.dtype
        self.limits = replace(tower.limits, dtype=dtype if dtype.itemsize == 2 else torch.bfloat16)
        self.broken: str | None = None
        self.batches = 0

    def activation_bytes(self, images: int) -> int:
        copied = images * self.limits.rows * self.limits.row_bytes
        return self._tower.activation_bytes(images) + 2 * copied

    def encode(self, pixels: Tensor, grid: tuple[int, int], pause: Pause = no_pause) -> Tensor:
        self.batches += 1
        try:
            features = self._tower.encode(pixels, grid, pause)
            return features.to(self.limits.dtype).to("cpu")
        except torch.AcceleratorError as error:
            self.broken = str(error)
            raise


def check_cache(cache_bytes: int | None, tower: VisionTower) -> None:
    """ConfigurationError: `cache_bytes` cannot hold the features of one image."""
    limits = OutgoingTower(tower).limits
    largest = limits.rows * limits.row_bytes
    if cache_bytes is not None and cache_bytes < largest:
        raise ConfigurationError(
            f"`vision.cache_bytes` is {cache_bytes:,}; the features of one image may take "
            f"{largest:,}."
        )
