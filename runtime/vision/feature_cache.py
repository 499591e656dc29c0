"""Image features by digest: computed when a chunk needs them, cached within a budget."""

import time
from collections import OrderedDict
from collections.abc import Callable, Iterable
from concurrent.futures import Future

from torch import Tensor

from runtime.errors import CaravanError, GenerationFailedError
from runtime.vision.encoder import ImageEncoder, PreparedImage


class FeatureStore:
    """Cached features, and features being encoded, take at most `budget_bytes` together.

    Each call of `provide` names all needed images, the most urgent first; as many as fit are kept
    or submitted. Other entries are evicted when memory is needed, least recently used first. So the
    first needed image is always provided if it fits into the budget alone. Not thread-safe, except
    that `wake` is called on the encoder's thread when an image is finished. `clock` in seconds.
    """

    def __init__(
        self,
        encoder: ImageEncoder,
        *,
        budget_bytes: int,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.wake: Callable[[], None] = lambda: None
        self.encoded = 0
        self._encoder, self._clock = encoder, clock
        self._budget = budget_bytes
        self._cached: OrderedDict[bytes, Tensor] = OrderedDict()  # least recently used first
        self._submitted: dict[bytes, tuple[PreparedImage, Future[Tensor]]] = {}
        self._queued = 0  # images that are needed and not submitted yet
        self._waiting_since: float | None = None

    @property
    def pending(self) -> int:
        """Number of images that are being encoded or queued for it."""
        return len(self._submitted) + self._queued

    @property
    def waiting_since(self) -> float | None:
        """Time of `clock` since which the encoder has computed no part of an image; None if it is
        idle, or if images of others may be in front."""
        progressed, waiting = self._encoder.progressed_at, self._waiting_since
        return None if progressed is None or waiting is None else max(progressed, waiting)

    @property
    def held_bytes(self) -> int:
        cached = sum(features.nbytes for features in self._cached.values())
        return cached + sum(self._size(image) for image, _ in self._submitted.values())

    @property
    def has_finished(self) -> bool:
        """Whether `collect` has something to take."""
        return any(future.done() for _, future in self._submitted.values())

    def ready(self, digest: bytes) -> bool:
        return digest in self._cached

    def lookup(self, digest: bytes) -> Tensor:
        """[rows, width] of an image that is ready."""
        return self._cached[digest]

    def touch(self, digest: bytes) -> None:
        """Mark an image that is ready as recently used."""
        self._cached.move_to_end(digest)

    def collect(self) -> dict[bytes, CaravanError]:
        """Cache the features that are finished; returns the error of each image that failed."""
        ended = [digest for digest, (_, future) in self._submitted.items() if future.done()]
        failures = {}
        for digest in ended:
            image, future = self._submitted.pop(digest)
            failure = self._failure(image, future)
            if failure is None:
                self._cached[digest] = future.result()
                self.encoded += 1
            else:
                failures[digest] = failure
        if ended:
            self._waiting_since = self._clock() if self._submitted else None
        return failures

    def provide(self, wanted: Iterable[PreparedImage]) -> None:
        """`wanted`: all needed images, the most urgent first; may have duplicates."""
        chosen = self._fitting(wanted)
        self._cancel_all_but(chosen)
        for digest in reversed(chosen):
            if digest in self._cached:
                self._cached.move_to_end(digest)
        missing = [
            i for d, i in chosen.items() if d not in self._cached and d not in self._submitted
        ]
        self._queued = len(missing)
        for image in missing:
            if self._all_submitted or not self._make_room(self._size(image), chosen):
                return  # tried again when another image has been encoded
            self._submit(image)
            self._queued -= 1

    def close(self) -> None:
        self._encoder.close()

    @property
    def _all_submitted(self) -> bool:
        most = self._encoder.max_submitted
        return most is not None and len(self._submitted) >= most

    def _fitting(self, wanted: Iterable[PreparedImage]) -> dict[bytes, PreparedImage]:
        chosen: dict[bytes, PreparedImage] = {}
        room = self._budget
        for image in wanted:
            if image.digest not in chosen:
                room -= self._size(image)
                if room < 0:
                    break
                chosen[image.digest] = image
        return chosen

    def _cancel_all_but(self, chosen: dict[bytes, PreparedImage]) -> None:
        for digest in [d for d in self._submitted if d not in chosen]:
            _, future = self._submitted[digest]
            if future.cancel():
                del self._submitted[digest]
        if not self._submitted:
            self._waiting_since = None

    def _make_room(self, size: int, chosen: dict[bytes, PreparedImage]) -> bool:
        excess = self.held_bytes + size - self._budget
        for digest in [d for d in self._cached if d not in chosen]:
            if excess <= 0:
                break
            excess -= self._cached.pop(digest).nbytes
        return excess <= 0

    def _submit(self, image: PreparedImage) -> None:
        if not self._submitted:
            self._waiting_since = self._clock()
        future = self._encoder.submit(image)
        self._submitted[image.digest] = image, future
        future.add_done_callback(lambda _: self.wake())

    def _size(self, image: PreparedImage) -> int:
        return image.rows * self._encoder.limits.row_bytes

    def _failure(self, image: PreparedImage, future: Future[Tensor]) -> CaravanError | None:
        if future.cancelled():
            return GenerationFailedError("the encoder has been closed.")
        error = future.exception()
        if isinstance(error, CaravanError):
            return error
        if error is not None:
            return GenerationFailedError(f"{type(error).__name__}: {error}")
        limits, features = self._encoder.limits, future.result()
        if features.shape == (image.rows, limits.width) and features.dtype is limits.dtype:
            return None
        return GenerationFailedError(
            f"the encoder returned {features.dtype} {list(features.shape)} instead of "
            f"{limits.dtype} {[image.rows, limits.width]}."
        )
