"""Prepared images, and encoders that compute their features."""

import time
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from math import prod
from threading import Lock
from typing import Protocol

import torch
from torch import Tensor

from runtime.engine.request import NO_ORIGIN, RequestOrigin
from runtime.errors import UnsupportedModelError
from runtime.vision.step_gate import StepGate

# Batch size by device type; on a CPU, batches are not faster and delay each image.
_BATCH_IMAGES = {"cuda": 4}
# A function that a tower calls between parts of its work; it may block.
Pause = Callable[[], None]


def no_pause() -> None:
    """A pause function that does not wait."""


@dataclass(frozen=True, slots=True, eq=False)
class PreparedImage:
    """The output of an image processor.

    `pixels`: float32 on the host, contiguous; processor and tower define the shape, which is
    [patches, values] if an image has views of several sizes. `grid`: rows and columns that the
    tower needs besides that shape, of the rectangle of feature rows or of tiles; (1, 1) if it needs
    none. Images with one shape and grid have the same views. `digest` identifies the features:
    pixels, processor settings and projector together. `rows`: feature rows, including padding,
    which comes last. `tenant`, `origin`: the tenant and the HTTP request that the image belongs to.
    """

    pixels: Tensor
    grid: tuple[int, int]
    digest: bytes
    rows: int
    tenant: str = ""
    origin: RequestOrigin = NO_ORIGIN

    def batches_with(self, other: "PreparedImage") -> bool:
        """Whether both may be encoded in one batch."""
        return self.pixels.shape == other.pixels.shape and self.grid == other.grid


@dataclass(frozen=True, slots=True)
class ImageOutline:
    """Shape of a prepared image, known from the image's size before it is decoded.

    `shape`: shape of the pixels; `grid` and `rows`: as in PreparedImage.
    """

    shape: tuple[int, ...]
    grid: tuple[int, int]
    rows: int

    @property
    def elements(self) -> int:
        """Of the pixels."""
        return prod(self.shape)

    @property
    def nbytes(self) -> int:
        """Size of the float32 pixels."""
        return 4 * self.elements

    def blank(self) -> PreparedImage:
        """An image of zeros."""
        return PreparedImage(torch.zeros(self.shape), self.grid, bytes(16), self.rows)


@dataclass(frozen=True, slots=True)
class ImageLimits:
    """The largest images of a model.

    `rows`: an upper bound of the feature rows of every image. `largest`: an image that the model's
    processor can produce, with that many rows or nearly so; no image has more pixels per row.
    `width`, `dtype`: of a feature row; `width` is the hidden size, or a multiple of it if the first
    layers receive further parts, the embedding first. `whole`: positions of the longest image that
    must be computed in one step, because attention inside is bidirectional; 0 if none must.
    """

    rows: int
    largest: ImageOutline
    width: int
    dtype: torch.dtype
    whole: int = 0

    @property
    def row_bytes(self) -> int:
        return self.width * self.dtype.itemsize

    @property
    def pixel_elements(self) -> int:
        """An upper bound on the elements of `PreparedImage.pixels`: those of the largest image,
        scaled to `rows`."""
        return -(-self.largest.elements * self.rows // self.largest.rows)


class VisionTower(Protocol):
    """A model from pixels to features.

    `activation_bytes(images)` bounds what `encode` allocates for that many images of any shape,
    including its result. `encode` takes images of one shape and grid, pixels [images, ...] float32
    on its device, and returns [images, rows, width]; the features of an image do not depend on the
    others. It does not synchronise the device, may run in parallel to a decoder in another thread,
    and calls `pause` between parts of its work.
    """

    limits: ImageLimits

    def activation_bytes(self, images: int) -> int: ...

    def encode(self, pixels: Tensor, grid: tuple[int, int], pause: Pause = no_pause) -> Tensor: ...


class EncoderNeeds(Protocol):
    """The memory that an ImageEncoder needs on the device, and its largest images."""

    @property
    def limits(self) -> ImageLimits: ...

    @property
    def weight_bytes(self) -> int: ...

    @property
    def workspace_bytes(self) -> int: ...


@dataclass(frozen=True, slots=True)
class PlannedEncoder:
    """The needs of a LocalEncoder before it is created."""

    limits: ImageLimits
    weight_bytes: int
    workspace_bytes: int

    @classmethod
    def of(cls, tower: VisionTower, device: torch.device, *, weight_bytes: int) -> "PlannedEncoder":
        workspace = batch_bytes(tower, _BATCH_IMAGES.get(device.type, 1))
        return cls(tower.limits, weight_bytes, workspace)


def batch_bytes(tower: VisionTower, images: int) -> int:
    """Memory for a batch on the tower's device: pixels, and what `encode` allocates."""
    return tower.activation_bytes(images) + 4 * images * tower.limits.pixel_elements


class ImageEncoder(EncoderNeeds, Protocol):
    """Computes image features asynchronously, here or in another process.

    `weight_bytes`, `workspace_bytes`: memory on this engine's device. The future of `submit` has
    the features [rows, width] on that device; an image that is cancelled before its turn is not
    computed. `warm_up` fails at start if memory is missing. `max_submitted`: maximum number of
    submitted images, None for any; they are encoded in order, so a small number lets a more urgent
    later image come next. `progressed_at`: time of the store's clock when it last computed a part
    of an image; None if images of others may come first, for any time, and the encoder itself
    notices when it makes no progress. `gate`: closed during steps that encoding must not delay;
    None if encoding does not compete with steps for processors.
    """

    @property
    def max_submitted(self) -> int | None: ...

    @property
    def progressed_at(self) -> float | None: ...

    @property
    def gate(self) -> StepGate | None: ...

    def warm_up(self) -> None: ...

    def submit(self, image: PreparedImage) -> Future[Tensor]: ...

    def close(self) -> None: ...


class LocalEncoder:
    """Runs a tower in this process, on its own thread and, on CUDA, its own stream.

    `weight_bytes`: of the tower's tensors. `batch_images`: maximum number of images of one shape
    that are encoded together. It computes with as many threads as torch uses where it is created.
    `first`: the image that `warm_up` encodes; None: the largest. `clock` in seconds, that of the
    `FeatureStore`.
    """

    def __init__(
        self,
        tower: VisionTower,
        *,
        device: torch.device,
        weight_bytes: int,
        batch_images: int | None = None,
        first: PreparedImage | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._tower, self._device, self._clock = tower, device, clock
        self.weight_bytes = weight_bytes
        self._first = first
        self.progressed_at = clock()
        self.batch_images = batch_images or _BATCH_IMAGES.get(device.type, 1)
        self.gate = StepGate() if device.type == "cpu" else None
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None
        self._lock = Lock()
        self._queue: deque[_Encoding] = deque()
        self._worker = ThreadPoolExecutor(
            1, "encoder", initializer=torch.set_num_threads, initargs=(torch.get_num_threads(),)
        )

    @property
    def limits(self) -> ImageLimits:
        return self._tower.limits

    @property
    def max_submitted(self) -> int:
        """Two batches: the one being encoded and the next one."""
        return 2 * self.batch_images

    @property
    def workspace_bytes(self) -> int:
        return batch_bytes(self._tower, self.batch_images)

    def warm_up(self) -> None:
        """Encode a batch of the first image. UnsupportedModelError: its features do not have the
        planned shape."""
        if self._device.type == "cpu":  # where the first image may be smaller than the largest
            torch.empty(self.workspace_bytes, dtype=torch.uint8)
        image, limits = self._first or self.limits.largest.blank(), self.limits
        batch = [image] * self.batch_images
        for features in self._worker.submit(self._encode_and_wait, batch).result():
            if features.shape != (image.rows, limits.width) or image.rows > limits.rows:
                raise UnsupportedModelError(
                    f"The vision part of the model turns an image of {image.rows:,} rows into "
                    f"features of shape {tuple(features.shape)}; at most {limits.rows:,} rows of "
                    f"{limits.width:,} numbers are planned for. Serve the model without its vision "
                    "part, or convert it again."
                )

    def submit(self, image: PreparedImage) -> Future[Tensor]:
        job = _Encoding(image, Future())
        with self._lock:
            self._queue.append(job)
        self._worker.submit(self._work)
        return job.features

    def close(self) -> None:
        """Wait for the images that are being encoded; the futures of the others are cancelled."""
        with self._lock:
            jobs, self._queue = self._queue, deque()
        for job in jobs:
            job.features.cancel()
        self._worker.shutdown()

    def _work(self) -> None:
        """Runs once for each submitted image; an earlier run may have taken several of them."""
        jobs = self._take()
        if len(jobs) > 1 and self._finished(jobs):
            return
        for job in jobs:  # one by one, so that none fails because of another
            if not self._finished([job]):
                job.features.set_exception(job.failure)

    def _take(self) -> list["_Encoding"]:
        """The oldest image, and the next ones that can be encoded in the same batch."""
        with self._lock:
            waiting = [job for job in self._queue if not job.features.cancelled()]
            taken = [job for job in waiting if job.image.batches_with(waiting[0].image)]
            taken = taken[: self.batch_images]
            self._queue = deque(job for job in waiting if job not in taken)
        return [job for job in taken if job.features.set_running_or_notify_cancel()]

    def _finished(self, jobs: Sequence["_Encoding"]) -> bool:
        try:
            features = self._encode_and_wait([job.image for job in jobs])
        except Exception as error:
            for job in jobs:
                job.failure = error
            return False
        for job, rows in zip(jobs, features, strict=True):
            job.features.set_result(rows)
        return True

    @torch.inference_mode()
    def _encode_and_wait(self, images: Sequence[PreparedImage]) -> list[Tensor]:
        """The features [rows, width] of each image."""
        with torch.cuda.stream(self._stream):
            pixels = torch.stack([image.pixels for image in images]).to(self._device)
            features = self._tower.encode(pixels, images[0].grid, self._pause)
            # Separate tensors, so that each can be freed alone.
            parts = [part.clone() for part in features] if len(images) > 1 else [features[0]]
        if self._stream is not None:
            self._stream.synchronize()
        return parts

    def _pause(self) -> None:
        """Between parts of an image. One image may take many minutes on few processors, so each
        part counts as progress."""
        if self.gate is not None:
            self.gate.pause()
        self.progressed_at = self._clock()


@dataclass(slots=True, eq=False)
class _Encoding:
    image: PreparedImage
    features: Future[Tensor]
    failure: Exception | None = None
