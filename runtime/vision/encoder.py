"""Images on their way to features: what a processor makes of them, and who computes features."""

from collections import deque
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from threading import Lock
from typing import Protocol

import torch
from torch import Tensor

from runtime.errors import UnsupportedModelError

# What a tower takes at once; on a CPU more gain nothing, and each image would wait for all.
_MOST_AT_ONCE = {"cuda": 4}


@dataclass(frozen=True, slots=True, eq=False)
class PreparedImage:
    """What a processor makes of a picture.

    `pixels`: float32 on the host, contiguous; of what shape, processor and tower agree on. `grid`:
    rows and columns of whatever the tower has to know beside that shape: of the rectangle that its
    feature rows form, or of tiles; (1, 1) where there is nothing to know. `digest` names the
    features: pixels, processor settings and projector together. `rows`: how many rows of features
    the image has, those of padding included, which come last. `tenant`: on whose behalf it is
    encoded.
    """

    pixels: Tensor
    grid: tuple[int, int]
    digest: bytes
    rows: int
    tenant: str = ""

    def is_like(self, other: "PreparedImage") -> bool:
        """Whether both may be encoded as one batch."""
        return self.pixels.shape == other.pixels.shape and self.grid == other.grid


@dataclass(frozen=True, slots=True)
class ImageLimits:
    """The worst images of a model.

    `rows`: of one image's features at most. `width`, `dtype`: of such a row, which is [hidden], or
    several of these where the first layers get further parts, the embedding first. `whole`:
    positions of the longest image that must be computed in one step, because attention inside is
    bidirectional; 0 where none must.
    """

    rows: int
    width: int
    dtype: torch.dtype
    whole: int = 0

    @property
    def row_bytes(self) -> int:
        return self.width * self.dtype.itemsize


class VisionTower(Protocol):
    """A model from pixels to features.

    `weight_bytes`: of its own tensors. `limits.rows` bounds the rows of every image; `largest` is
    an image that the model's processor really produces, with as many rows or nearly so, and no
    image has more pixels for each row of `limits.rows`. `activation_bytes(images)` bounds what
    `encode` allocates for so many images of any shape, its result included. `encode` takes images
    that are alike, pixels [images, ...] float32 on its device, and returns [images, rows, width];
    no image changes what another one gets. It does not wait for the device, and may run beside a
    decoder in another thread.
    """

    limits: ImageLimits

    @property
    def weight_bytes(self) -> int: ...

    def activation_bytes(self, images: int) -> int: ...

    def largest(self) -> PreparedImage: ...

    def encode(self, pixels: Tensor, grid: tuple[int, int]) -> Tensor: ...


class EncoderNeeds(Protocol):
    """What an ImageEncoder takes of the device, and its worst images."""

    @property
    def limits(self) -> ImageLimits: ...

    @property
    def weight_bytes(self) -> int: ...

    @property
    def workspace_bytes(self) -> int: ...


@dataclass(frozen=True, slots=True)
class ForeseenEncoder:
    """The needs of a LocalEncoder that has yet to be made."""

    limits: ImageLimits
    weight_bytes: int
    workspace_bytes: int

    @classmethod
    def of(cls, tower: VisionTower, device: torch.device) -> "ForeseenEncoder":
        workspace = batch_bytes(tower, _MOST_AT_ONCE.get(device.type, 1))
        return cls(tower.limits, tower.weight_bytes, workspace)


def batch_bytes(tower: VisionTower, images: int) -> int:
    """What encoding so many images takes of the tower's device: their pixels side by side, and what
    the tower allocates."""
    return tower.activation_bytes(images) + 4 * images * most_pixels(tower)


def most_pixels(tower: VisionTower) -> int:
    """An upper bound of the numbers that the pixels of one image have: those of the largest image,
    in proportion to the rows that it lacks."""
    largest = tower.largest()
    return -(-largest.pixels.numel() * tower.limits.rows // largest.rows)


class ImageEncoder(Protocol):
    """Computes features in its own time, here or elsewhere.

    `weight_bytes` and `workspace_bytes`: what it takes of this engine's device. The future of
    `submit` gives the features [rows, width] on that device, complete; one that is cancelled
    before its turn is never computed. `warm_up` shows at start what memory lacks. `most_submitted`:
    how many images it is given at once, None for any number; it takes them in order, so where they
    are few, what becomes urgent later is next.
    """

    @property
    def most_submitted(self) -> int | None: ...

    @property
    def limits(self) -> ImageLimits: ...

    @property
    def weight_bytes(self) -> int: ...

    @property
    def workspace_bytes(self) -> int: ...

    def warm_up(self) -> None: ...

    def submit(self, image: PreparedImage) -> Future[Tensor]: ...

    def close(self) -> None: ...


class LocalEncoder:
    """A tower in this process, on a thread of its own and, on CUDA, a stream of its own.

    `most_at_once`: how many images that are alike go through it together.
    """

    def __init__(
        self, tower: VisionTower, *, device: torch.device, most_at_once: int | None = None
    ) -> None:
        self._tower, self._device = tower, device
        self.most_at_once = most_at_once or _MOST_AT_ONCE.get(device.type, 1)
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None
        self._lock = Lock()
        self._queue: deque[_Job] = deque()
        self._worker = ThreadPoolExecutor(max_workers=1, thread_name_prefix="encoder")

    @property
    def limits(self) -> ImageLimits:
        return self._tower.limits

    @property
    def most_submitted(self) -> int:
        """The batch that is being encoded and the next one."""
        return 2 * self.most_at_once

    @property
    def weight_bytes(self) -> int:
        return self._tower.weight_bytes

    @property
    def workspace_bytes(self) -> int:
        return batch_bytes(self._tower, self.most_at_once)

    def warm_up(self) -> None:
        """Encode a batch of the largest image; UnsupportedModelError where its features are not
        what memory is planned for."""
        image, limits = self._tower.largest(), self.limits
        batch = [image] * self.most_at_once
        for features in self._worker.submit(self._encode_and_wait, batch).result():
            if features.shape != (image.rows, limits.width) or image.rows > limits.rows:
                raise UnsupportedModelError(
                    f"The vision part of the model turns an image of {image.rows:,} rows into "
                    f"features of shape {tuple(features.shape)}; at most {limits.rows:,} rows of "
                    f"{limits.width:,} numbers are planned for. Serve the model without its vision "
                    "part, or convert it again."
                )

    def submit(self, image: PreparedImage) -> Future[Tensor]:
        job = _Job(image, Future())
        with self._lock:
            self._queue.append(job)
        self._worker.submit(self._work)
        return job.features

    def close(self) -> None:
        """Waits for the images that are being encoded; the others' futures are cancelled."""
        with self._lock:
            jobs, self._queue = self._queue, deque()
        for job in jobs:
            job.features.cancel()
        self._worker.shutdown()

    def _work(self) -> None:
        """Once for each submitted image; what an earlier turn took along is gone already."""
        jobs = self._take()
        if len(jobs) > 1 and self._finished(jobs):
            return
        for job in jobs:  # one by one, so that none fails for another's sake
            if not self._finished([job]):
                job.features.set_exception(job.failure)

    def _take(self) -> list["_Job"]:
        """The oldest image and others like it, in order."""
        with self._lock:
            waiting = [job for job in self._queue if not job.features.cancelled()]
            taken = [job for job in waiting if job.image.is_like(waiting[0].image)][
                : self.most_at_once
            ]
            self._queue = deque(job for job in waiting if job not in taken)
        return [job for job in taken if job.features.set_running_or_notify_cancel()]

    def _finished(self, jobs: Sequence["_Job"]) -> bool:
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
        """[rows, width] of each."""
        with torch.cuda.stream(self._stream):
            pixels = torch.stack([image.pixels for image in images]).to(self._device)
            features = self._tower.encode(pixels, images[0].grid)
            # Apart, so that one can be dropped without the others.
            parts = [part.clone() for part in features] if len(images) > 1 else [features[0]]
        if self._stream is not None:
            self._stream.synchronize()
        return parts


@dataclass(slots=True, eq=False)
class _Job:
    image: PreparedImage
    features: Future[Tensor]
    failure: Exception | None = None
