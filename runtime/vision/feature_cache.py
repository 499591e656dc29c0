"""Features of images by digest: computed when somebody wants them, kept within a budget."""

import time
from collections import OrderedDict
from collections.abc import Callable, Iterable
from concurrent.futures import Future

from torch import Tensor

from runtime.errors import CaravanError
from runtime.vision.encoder import ImageEncoder, PreparedImage


class FeatureStore:
    """What is there and what is being encoded never takes more than `budget_bytes` together.

    Whoever calls says each time all that is wanted, the most urgent first. As much of it as fits
    is kept or asked for; unreferenced entries are evicted when room is needed, the longest
    unused first. So the first of the wanted always comes, if the budget holds it alone. For one
    thread, except `wake`, which the encoder calls from its own when something has ended. `clock`
    tells seconds.
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
        self._there: OrderedDict[bytes, Tensor] = OrderedDict()  # least recently wanted first
        self._coming: dict[bytes, tuple[PreparedImage, Future[Tensor]]] = {}
        self._kept_back = 0  # images that are wanted and not submitted yet
        self._waiting_since: float | None = None

    @property
    def coming(self) -> int:
        """How many images are being encoded, or wait for it."""
        return len(self._coming) + self._kept_back

    @property
    def waiting_since(self) -> float | None:
        """Time of the encoder's last sign of life, where an image is expected of it."""
        return self._waiting_since

    @property
    def held_bytes(self) -> int:
        there = sum(features.nbytes for features in self._there.values())
        return there + sum(self._size(image) for image, _ in self._coming.values())

    @property
    def has_news(self) -> bool:
        return any(future.done() for _, future in self._coming.values())

    def ready(self, digest: bytes) -> bool:
        return digest in self._there

    def lookup(self, digest: bytes) -> Tensor:
        """[rows, width] of an image that is ready."""
        return self._there[digest]

    def touch(self, digest: bytes) -> None:
        """An image that is ready has been of use: it goes after those that have not."""
        self._there.move_to_end(digest)

    def collect(self) -> dict[bytes, str]:
        """Take in what has been encoded; why the images failed that did."""
        ended = [digest for digest, (_, future) in self._coming.items() if future.done()]
        failures = {}
        for digest in ended:
            image, future = self._coming.pop(digest)
            failure = self._failure(image, future)
            if failure is None:
                self._there[digest] = future.result()
                self.encoded += 1
            else:
                failures[digest] = failure
        if ended:
            self._waiting_since = self._clock() if self._coming else None
        return failures

    def provide(self, wanted: Iterable[PreparedImage]) -> None:
        """`wanted`: the most urgent first; an image may come several times."""
        chosen = self._fitting(wanted)
        self._cancel_all_but(chosen)
        for digest in reversed(chosen):
            if digest in self._there:
                self._there.move_to_end(digest)
        missing = [i for d, i in chosen.items() if d not in self._there and d not in self._coming]
        self._kept_back = len(missing)
        for image in missing:
            if self._all_submitted or not self._make_room(self._size(image), chosen):
                return  # until an image has been encoded
            self._submit(image)
            self._kept_back -= 1

    def close(self) -> None:
        self._encoder.close()

    @property
    def _all_submitted(self) -> bool:
        most = self._encoder.most_submitted
        return most is not None and len(self._coming) >= most

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
        for digest in [d for d in self._coming if d not in chosen]:
            _, future = self._coming[digest]
            if future.cancel():
                del self._coming[digest]
        if not self._coming:
            self._waiting_since = None

    def _make_room(self, size: int, chosen: dict[bytes, PreparedImage]) -> bool:
        excess = self.held_bytes + size - self._budget
        for digest in [d for d in self._there if d not in chosen]:
            if excess <= 0:
                break
            excess -= self._there.pop(digest).nbytes
        return excess <= 0

    def _submit(self, image: PreparedImage) -> None:
        if not self._coming:
            self._waiting_since = self._clock()
        future = self._encoder.submit(image)
        self._coming[image.digest] = image, future
        future.add_done_callback(lambda _: self.wake())

    def _size(self, image: PreparedImage) -> int:
        return image.rows * self._encoder.limits.row_bytes

    def _failure(self, image: PreparedImage, future: Future[Tensor]) -> str | None:
        if future.cancelled():
            return "the encoder has been closed."
        error = future.exception()
        if error is not None:
            told = isinstance(error, CaravanError)
            return str(error) if told else f"{type(error).__name__}: {error}"
        limits, features = self._encoder.limits, future.result()
        if features.shape == (image.rows, limits.width) and features.dtype is limits.dtype:
            return None
        return (
            f"the encoder gave {tuple(features.shape)} numbers of {features.dtype} where "
            f"({image.rows}, {limits.width}) of {limits.dtype} belong."
        )
