"""One vision tower that many replicas ask: images in, features out; knows nothing of Ray."""

import asyncio
import contextlib
import math
import os
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from runtime.engine.engine import dead
from runtime.errors import ConfigurationError, GenerationFailedError, RequestError
from runtime.vision.encoder import LocalEncoder, PreparedImage, VisionTower, most_pixels
from runtime.vision.feature_cache import FeatureStore
from serve_app.gateway.fair_gate import FairGate
from serve_app.transport.features import EncodeRequest

IMAGES_KEPT = 16  # of the largest, by default
# Answers on their way at once: features that the cache has dropped since may be among them.
SENT_AT_ONCE = 8


@dataclass(frozen=True, slots=True)
class EncoderStatistics:
    """Where an encoder stands (the first three) and what it has done since its start.

    `images_waiting`: asked for and not answered. `images_known_total`: answered without encoding;
    `batches_total`: calls of the tower.
    """

    pid: int
    images_waiting: int
    feature_bytes: int
    images_encoded_total: int
    images_known_total: int
    batches_total: int


@dataclass(slots=True, eq=False)
class Visit:
    """One caller's time with one image. Of those who ask for the same one, the first leads: it
    brings the pixels, the others wait until it has `ended`."""

    asked: EncodeRequest
    ended: asyncio.Event = field(default_factory=asyncio.Event)
    has_room: bool = False
    image: PreparedImage | None = None
    features: asyncio.Future[Tensor] | None = None
    failure: Exception | None = None


class EncoderReplica:
    """Features by digest: those that are cached at once, others when their pixels have come.

    An image is brought and encoded once, however many ask for it. At any time only so many bring
    pixels that the next batch is there when the tower has done this one; others wait, and tenants
    are served in turn.
    `name`: of the file with the weights. `stall_s`: with no image encoded for so long, `check`
    calls the encoder dead, by the `clock`. For one event loop.
    """

    def __init__(
        self,
        tower: VisionTower,
        *,
        name: bytes,
        device: torch.device,
        cache_bytes: int | None = None,
        batch_images: int | None = None,
        stall_s: float = 300.0,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._name = name
        self._tower = OutgoingTower(tower)
        self._encoder = LocalEncoder(self._tower, device=device, most_at_once=batch_images)
        self._most_pixels = most_pixels(tower)
        check_cache(cache_bytes, tower)
        self._cache_bytes = cache_bytes or IMAGES_KEPT * self._largest_bytes
        self._store = FeatureStore(self._encoder, budget_bytes=self._cache_bytes, clock=clock)
        self._store.wake = self._wake
        self._places = 2 * self.batch_images
        self._room = FairGate(self._places)
        self.draining = asyncio.Semaphore(SENT_AT_ONCE)
        self._leaders: dict[bytes, Visit] = {}
        self._visitors = self._known = 0
        self._stall_s, self._clock = stall_s, clock
        self._loop: asyncio.AbstractEventLoop | None = None

    @property
    def batch_images(self) -> int:
        return self._encoder.most_at_once

    @property
    def weight_bytes(self) -> int:
        return self._encoder.weight_bytes

    @property
    def device_bytes(self) -> int:
        """At worst, of the tower's device, beside its weights."""
        return self._encoder.workspace_bytes

    @property
    def host_bytes(self) -> int:
        """At worst, of the host: pixels that wait, features that are kept, and those that leave."""
        pixels = self._places * self._most_pixels * torch.float32.itemsize
        return pixels + self._cache_bytes + SENT_AT_ONCE * self._largest_bytes

    def warm_up(self) -> None:
        """Shows at start what memory lacks."""
        self._encoder.warm_up()

    @contextmanager
    def visit(self, asked: EncodeRequest) -> Iterator[Visit]:
        """Leaving it, for any reason, ends what is done for this caller alone.

        RequestError for an image that is none of this tower's, EngineDeadError as from `check`.
        """
        self.check()
        self._refuse_foreign(asked)
        self._loop = asyncio.get_running_loop()
        visit = Visit(asked)
        self._visitors += 1
        try:
            yield visit
        finally:
            self._visitors -= 1
            self._end(visit)

    async def known(self, visit: Visit) -> Tensor | None:
        """Its features [rows, width], in 16 bits on the host; None when this caller is to bring
        the pixels now, and there is room for them."""
        digest = visit.asked.digest
        while not self._store.ready(digest):
            leader = self._leaders.get(digest)
            if leader is None:
                self._leaders[digest] = visit
                await self._room.enter(visit.asked.tenant)
                visit.has_room = True
                return None
            await leader.ended.wait()
            if leader.failure is not None:
                raise leader.failure
        self._known += 1
        self._store.touch(digest)
        return self._store.lookup(digest)

    async def encoded(self, visit: Visit, pixels: Tensor) -> Tensor:
        """The same, of the pixels that the caller has brought.

        GenerationFailedError: the tower fails at this image; EngineDeadError: at any.
        """
        assert visit.has_room and self._loop is not None
        asked = visit.asked
        if self._store.ready(asked.digest):  # by the pixels of one who has left meanwhile
            return self._store.lookup(asked.digest)
        visit.image = PreparedImage(pixels, asked.grid, asked.digest, asked.rows)
        visit.features = self._loop.create_future()
        self._provide()
        try:
            return await visit.features
        except Exception as error:
            visit.failure = error
            raise

    def check(self) -> None:
        """Raise EngineDeadError unless the tower works and makes progress."""
        if self._tower.broken is not None:
            raise dead(self._tower.broken)
        since = self._store.waiting_since
        if since is not None and since < self._clock() - self._stall_s:
            raise dead(f"no image has been encoded for {self._stall_s:.0f} seconds.")

    def statistics(self) -> EncoderStatistics:
        return EncoderStatistics(
            pid=os.getpid(),
            images_waiting=self._visitors,
            feature_bytes=self._store.held_bytes,
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

    def _refuse_foreign(self, asked: EncodeRequest) -> None:
        if asked.tower != self._name:
            raise RequestError(
                "The vision encoder has other weights than the image is meant for; replicas and "
                "encoders must be started from the same files."
            )
        pixels, limits = math.prod(asked.shape), self._tower.limits
        if asked.rows > limits.rows or pixels > self._most_pixels:
            raise RequestError(
                f"An image of {pixels:,} numbers for {asked.rows:,} rows of features; the vision "
                f"encoder takes {self._most_pixels:,} for {limits.rows:,} at most."
            )

    def _provide(self) -> None:
        leaders = self._leaders.values()
        self._store.provide(leader.image for leader in leaders if leader.image is not None)

    def _wake(self) -> None:
        """From the encoder's thread. A loop that is closed has nobody who waits."""
        assert self._loop is not None
        with contextlib.suppress(RuntimeError):
            self._loop.call_soon_threadsafe(self._collect)

    def _collect(self) -> None:
        failures = self._store.collect()
        for digest, leader in self._leaders.items():
            if leader.features is None or leader.features.done():
                continue
            if digest in failures:
                leader.image = None  # not to be tried again
                leader.features.set_exception(self._failure(failures[digest]))
            elif self._store.ready(digest):
                leader.features.set_result(self._store.lookup(digest))
        self._provide()

    def _failure(self, reason: str) -> Exception:
        broken = self._tower.broken
        return GenerationFailedError(reason) if broken is None else dead(broken)

    def _end(self, visit: Visit) -> None:
        if self._leaders.get(visit.asked.digest) is visit:
            del self._leaders[visit.asked.digest]
            self._provide()
        if visit.has_room:
            self._room.leave(visit.asked.tenant)
        visit.ended.set()


class OutgoingTower:
    """A tower whose features come in 16 bits, on the host, as they are kept and sent.

    What it computes in 16 bits stays as it is; float32 becomes bfloat16, which has its range:
    rows of features hold outliers that float16 cannot tell from infinity. `broken`: why the
    device computes nothing any more.
    """

    def __init__(self, tower: VisionTower) -> None:
        self._tower = tower
        dtype = tower.limits.dtype
        self.limits = replace(tower.limits, dtype=dtype if dtype.itemsize == 2 else torch.bfloat16)
        self.broken: str | None = None
        self.batches = 0

    @property
    def weight_bytes(self) -> int:
        return self._tower.weight_bytes

    def activation_bytes(self, images: int) -> int:
        copied = images * self.limits.rows * self.limits.row_bytes
        return self._tower.activation_bytes(images) + 2 * copied

    def largest(self) -> PreparedImage:
        return self._tower.largest()

    def encode(self, pixels: Tensor, grid: tuple[int, int]) -> Tensor:
        self.batches += 1
        try:
            features = self._tower.encode(pixels, grid)
            return features.to(self.limits.dtype).to("cpu")
        except torch.AcceleratorError as error:
            self.broken = str(error)
            raise


def check_cache(cache_bytes: int | None, tower: VisionTower) -> None:
    """ConfigurationError where they cannot hold the features of one image."""
    limits = OutgoingTower(tower).limits
    largest = limits.rows * limits.row_bytes
    if cache_bytes is not None and cache_bytes < largest:
        raise ConfigurationError(
            f"`vision.cache_bytes` is {cache_bytes:,}; the features of one image may take "
            f"{largest:,}."
        )
