"""What images take on the host: those of requests, and those that may come again.

One budget of bytes for all of it. What requests have is never dropped; what nobody has any more
goes when there is need of room, the longest unused first. A tenant with several requests may take
as many bytes as are still free.
"""

from collections import Counter, OrderedDict
from concurrent.futures import CancelledError
from dataclasses import dataclass
from threading import Lock

from runtime.errors import OverloadedError, RequestError
from runtime.vision.encoder import PreparedImage

UNBOUNDED = 1 << 62


@dataclass(slots=True)
class _Print:
    image: PreparedImage
    holders: int

    @property
    def nbytes(self) -> int:
        return self.image.pixels.nbytes


class ImageCache:
    """Prepared images by the names of their files. For any number of threads."""

    def __init__(self, *, budget_bytes: int = UNBOUNDED) -> None:
        self.budget_bytes = budget_bytes
        self.lock = Lock()
        self._prints: OrderedDict[bytes, _Print] = OrderedDict()  # least recently used first
        self._used = 0
        self._unused = 0
        self._taken_by: Counter[str] = Counter()  # for all requests of a tenant

    @property
    def used_bytes(self) -> int:
        """What requests have: files, images, and room for images to come."""
        return self._used

    @property
    def held_bytes(self) -> int:
        """The same, and the images that nobody has."""
        return self._used + self._unused

    def lease(
        self, file_bytes: int = 0, *, salt: bytes = b"", tenant: str | None = None
    ) -> "ImageLease":
        """A lease for a request with `file_bytes` of images; raises as `ImageLease.reserve`.

        Without a `tenant`, there is no limit for one alone.
        """
        lease = ImageLease(self, salt, tenant)
        lease.reserve(file_bytes)
        return lease

    # The rest is for loans, which hold the lock.

    def take(self, nbytes: int, *, tenant: str | None = None, others: bool = False) -> None:
        """OverloadedError where what is used leaves no room, or what the tenant's `others` use."""
        if self._used + nbytes > self.budget_bytes:
            raise OverloadedError(
                f"images of other requests take {self._used:,} bytes; `image_memory_bytes` is "
                f"{self.budget_bytes:,}, which leaves no room for {nbytes:,} more"
            )
        if tenant is not None:
            self._check_share(nbytes, self._taken_by[tenant], others=others)
            self._taken_by[tenant] += nbytes
        self._used += nbytes
        while self.held_bytes > self.budget_bytes:
            oldest = next(name for name, kept in self._prints.items() if not kept.holders)
            self._unused -= self._prints.pop(oldest).nbytes

    def give_back(self, nbytes: int) -> None:
        self._used -= nbytes

    def taken_by(self, tenant: str) -> int:
        return self._taken_by[tenant]

    def forget(self, tenant: str, nbytes: int) -> None:
        """A request of the tenant that took so much has ended."""
        self._taken_by[tenant] -= nbytes
        if not self._taken_by[tenant]:
            del self._taken_by[tenant]

    def _check_share(self, nbytes: int, own: int, *, others: bool) -> None:
        free = self.budget_bytes - self._used
        if others and nbytes and own + nbytes > free:
            raise OverloadedError(
                f"images of other requests of this client take {own:,} bytes; of the "
                f"`image_memory_bytes` that are left, {free:,}, some are kept for other clients"
            )

    def hold(self, name: bytes) -> PreparedImage | None:
        """The image, where there is one: it has one holder more."""
        kept = self._prints.get(name)
        if kept is None:
            return None
        if not kept.holders:
            self._unused -= kept.nbytes
            self._used += kept.nbytes
        kept.holders += 1
        self._prints.move_to_end(name)
        return kept.image

    def paste(self, name: bytes, image: PreparedImage) -> PreparedImage:
        """Into room that has been taken; the image, or another's where that came first."""
        found = self.hold(name)
        if found is not None:
            self.give_back(image.pixels.nbytes)
            return found
        self._prints[name] = _Print(image, holders=1)
        return image

    def let_go(self, name: bytes) -> None:
        kept = self._prints[name]
        kept.holders -= 1
        if not kept.holders:
            self._used -= kept.nbytes
            self._unused += kept.nbytes


class ImageLease:
    """What one request has of an album, until `close`.

    A thread that still works for it then is stopped by a CancelledError at its next step; between
    `begin_work` and `end_work` nothing is given back, since what the thread has cannot be freed.
    `salt`, at most 64 bytes: images are named so that only loans with the same one share them.
    """

    def __init__(
        self, image_cache: ImageCache, salt: bytes = b"", tenant: str | None = None
    ) -> None:
        self.salt = salt
        self._image_cache = image_cache
        self._tenant = tenant
        self._taken = 0  # by `reserve`
        self._names: list[bytes] = []
        self._reserved = 0
        self._image_bytes = 0
        self._working = False
        self._closed = False

    def reserve(self, nbytes: int) -> None:
        """Room for files, or for the pixels of images that `add` will bring.

        RequestError where this request alone takes more than there is, OverloadedError where it is
        others that leave no room.
        """
        with self._image_cache.lock:
            self._check_open()
            total, most = (
                self._reserved + self._image_bytes + nbytes,
                self._image_cache.budget_bytes,
            )
            if total > most:
                raise RequestError(
                    f"The images of the request take {total:,} bytes, as files and as pixels; at "
                    f"most {most:,} are accepted. Send fewer or smaller images, or raise "
                    "`image_memory_bytes`."
                )
            tenant = self._tenant
            others = tenant is not None and self._image_cache.taken_by(tenant) > self._taken
            self._image_cache.take(nbytes, tenant=tenant, others=others)
            self._taken += nbytes
            self._reserved += nbytes

    def find(self, name: bytes) -> PreparedImage | None:
        """The image of that name, where the album has it."""
        with self._image_cache.lock:
            self._check_open()
            found = self._image_cache.hold(name)
            if found is not None:
                self._note(name, found)
            return found

    def add(self, name: bytes, image: PreparedImage) -> PreparedImage:
        """Keep an image for whose pixels room has been reserved; it, or the same of another's."""
        with self._image_cache.lock:
            self._check_open()
            assert self._reserved >= image.pixels.nbytes, "room is reserved before"
            self._reserved -= image.pixels.nbytes
            kept = self._image_cache.paste(name, image)
            self._note(name, kept)
            return kept

    def begin_work(self) -> None:
        with self._image_cache.lock:
            self._working = True

    def end_work(self) -> None:
        with self._image_cache.lock:
            self._working = False
            self._return_if_over()

    def close(self) -> None:
        """Give everything back; the images stay for those who bring them again."""
        with self._image_cache.lock:
            self._closed = True
            self._return_if_over()

    def _return_if_over(self) -> None:
        if not self._closed or self._working:
            return
        self._image_cache.give_back(self._reserved)
        if self._tenant is not None:
            self._image_cache.forget(self._tenant, self._taken)
        self._reserved = self._taken = 0
        while self._names:
            self._image_cache.let_go(self._names.pop())

    def _note(self, name: bytes, image: PreparedImage) -> None:
        self._names.append(name)
        self._image_bytes += image.pixels.nbytes

    def _check_open(self) -> None:
        if self._closed:
            raise CancelledError("The request has ended.")
