"""Host memory for images: those of running requests, and a cache of prepared images.

One budget of bytes covers both. Images of running requests are never evicted; others are evicted
when memory is needed, least recently used first. A tenant with several requests may hold at most as
many bytes as are still free.
"""

from collections import Counter, OrderedDict
from collections.abc import Callable, Collection, Mapping
from concurrent.futures import CancelledError
from dataclasses import dataclass
from threading import Lock

from runtime.errors import OverloadedError, TooManyImagesError
from runtime.vision.encoder import PreparedImage

UNBOUNDED = 1 << 62


@dataclass(slots=True)
class _CachedImage:
    image: PreparedImage
    holders: int

    @property
    def nbytes(self) -> int:
        return self.image.pixels.nbytes


class ImageCache:
    """Prepared images by the digests of their files. Thread-safe. `freed`: called, in any thread,
    when a request has returned memory."""

    def __init__(self, *, budget_bytes: int = UNBOUNDED) -> None:
        self.budget_bytes = budget_bytes
        self.freed: Callable[[], None] = lambda: None
        self.lock = Lock()
        self._entries: OrderedDict[bytes, _CachedImage] = OrderedDict()  # least recently used first
        self._used = 0
        self._unused = 0
        self._taken_by: Counter[str] = Counter()  # bytes of all requests of a tenant

    @property
    def used_bytes(self) -> int:
        """Bytes of running requests: files, prepared images and reservations."""
        return self._used

    @property
    def held_bytes(self) -> int:
        """`used_bytes` plus cached images that no request uses."""
        return self._used + self._unused

    @property
    def taken(self) -> Mapping[str, int]:
        """Bytes of all requests by tenant."""
        return self._taken_by

    def lease(
        self,
        file_bytes: int = 0,
        *,
        ahead: int = 0,
        salt: bytes = b"",
        tenant: str | None = None,
    ) -> "ImageLease":
        """A lease for a request with `file_bytes` of image files, and memory for `ahead` bytes of
        the next `ImageLease.reserve`.

        Without `tenant`, no limit per tenant is enforced. Raises like `ImageLease.reserve`.
        """
        lease = ImageLease(self, salt, tenant)
        lease.reserve(file_bytes + ahead)
        lease.ahead = ahead
        return lease

    # The following methods are called by leases, which hold the lock.

    def take(self, nbytes: int, *, tenant: str | None = None, others: bool = False) -> None:
        """Adds to the used bytes, and evicts as needed. `others`: the tenant has other requests.

        OverloadedError if used bytes, or those of the tenant's other requests, leave too little
        memory.
        """
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
            oldest = next(name for name, kept in self._entries.items() if not kept.holders)
            self._unused -= self._entries.pop(oldest).nbytes

    def free(self, nbytes: int) -> None:
        self._used -= nbytes

    def taken_by(self, tenant: str) -> int:
        return self._taken_by[tenant]

    def untrack(self, tenant: str, nbytes: int) -> None:
        """Subtracts the bytes of a request that has ended from those of its tenant."""
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
        """The image if it is cached; adds a holder to it."""
        kept = self._entries.get(name)
        if kept is None:
            return None
        if not kept.holders:
            self._unused -= kept.nbytes
            self._used += kept.nbytes
        kept.holders += 1
        self._entries.move_to_end(name)
        return kept.image

    def insert(self, name: bytes, image: PreparedImage) -> PreparedImage:
        """Stores an image in reserved memory; returns the cached one if there already is one."""
        found = self.hold(name)
        if found is not None:
            self.free(image.pixels.nbytes)
            return found
        self._entries[name] = _CachedImage(image, holders=1)
        return image

    def release(self, name: bytes) -> None:
        kept = self._entries[name]
        kept.holders -= 1
        if not kept.holders:
            self._used -= kept.nbytes
            self._unused += kept.nbytes


class ImageLease:
    """The part of an image cache that one request uses, until `close`.

    After `close`, methods raise CancelledError in a thread that still works for the request.
    Between `begin_work` and `end_work` memory is not released, since that thread still uses it.
    `salt`, at most 64 bytes, is part of the names of images, so that only leases with equal salts
    share images. `missing`: the bytes of a `reserve` for which other requests left too little.
    """

    def __init__(self, cache: ImageCache, salt: bytes = b"", tenant: str | None = None) -> None:
        self.salt = salt
        self.missing: int | None = None
        self.ahead = 0  # of the reserved bytes, those for the next `reserve`
        self._cache = cache
        self._tenant = tenant
        self._taken = 0  # total of `reserve`, without released images
        self._taken_for: dict[bytes, int] = {}  # the part of it for each image that was added
        self._held: dict[bytes, PreparedImage] = {}
        self._reserved = 0
        self._image_bytes = 0
        self._working = False
        self._closed = False

    def reserve(self, nbytes: int) -> None:
        """Reserves memory for files, or for the pixels of images passed to `add` later.

        TooManyImagesError if this request alone exceeds the budget, OverloadedError if other
        requests leave too little of it.
        """
        with self._cache.lock:
            self._check_open()
            self._free(self.ahead)
            self.ahead = 0
            total, most = (
                self._reserved + self._image_bytes + nbytes,
                self._cache.budget_bytes,
            )
            if total > most:
                raise TooManyImagesError(
                    f"The images of the request take {total:,} bytes, as files and as pixels; at "
                    f"most {most:,} are accepted. Send fewer or smaller images, or raise "
                    "`image_memory_bytes`."
                )
            tenant = self._tenant
            others = tenant is not None and self._cache.taken_by(tenant) > self._taken
            try:
                self._cache.take(nbytes, tenant=tenant, others=others)
            except OverloadedError:
                self.missing = nbytes
                raise
            self._taken += nbytes
            self._reserved += nbytes

    def find(self, name: bytes) -> PreparedImage | None:
        """The image of that name, if cached. It is held and counted once, however often found."""
        with self._cache.lock:
            self._check_open()
            if name in self._held:
                return self._held[name]
            found = self._cache.hold(name)
            if found is not None:
                self._note(name, found)
            return found

    def add(self, name: bytes, image: PreparedImage) -> PreparedImage:
        """Stores an image for which memory is reserved; returns the cached one if there is one."""
        with self._cache.lock:
            self._check_open()
            assert self._reserved >= image.pixels.nbytes, "memory is reserved before"
            assert name not in self._held, "it would have been found"
            self._reserved -= image.pixels.nbytes
            self._taken_for[name] = image.pixels.nbytes
            kept = self._cache.insert(name, image)
            self._note(name, kept)
            return kept

    def keep_only(self, names: Collection[bytes]) -> None:
        """Releases the images of other names, which remain cached."""
        with self._cache.lock:
            self._check_open()
            for name in self._held.keys() - set(names):
                self._image_bytes -= self._held.pop(name).pixels.nbytes
                self._cache.release(name)
                self._return(self._taken_for.pop(name, 0))
            self._cache.freed()

    def begin_work(self) -> None:
        with self._cache.lock:
            self._working = True

    def end_work(self) -> None:
        with self._cache.lock:
            self._working = False
            self._release_if_done()

    def close(self) -> None:
        """Releases all memory; the images remain cached for other requests."""
        with self._cache.lock:
            self._closed = True
            self._release_if_done()

    def _release_if_done(self) -> None:
        if not self._closed or self._working:
            return
        self._cache.free(self._reserved)
        self._return(self._taken)
        self._reserved = 0
        for name in self._held:
            self._cache.release(name)
        self._held.clear()
        self._cache.freed()

    def _free(self, nbytes: int) -> None:
        """Gives back bytes that are reserved and not used."""
        self._cache.free(nbytes)
        self._reserved -= nbytes
        self._return(nbytes)

    def _return(self, nbytes: int) -> None:
        """Subtracts bytes from those that count for the tenant."""
        self._taken -= nbytes
        if self._tenant is not None:
            self._cache.untrack(self._tenant, nbytes)

    def _note(self, name: bytes, image: PreparedImage) -> None:
        self._held[name] = image
        self._image_bytes += image.pixels.nbytes

    def _check_open(self) -> None:
        if self._closed:
            raise CancelledError("The request has ended.")
