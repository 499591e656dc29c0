"""Files that clients upload in pieces, before they become blobs of the store."""

import hashlib
import os
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from threading import Lock
from typing import Any

from model_zoo.store.file_access import file_error
from model_zoo.store.manifest import ManifestLayer
from model_zoo.store.store import Store
from runtime.errors import OverloadedError, RequestError, SourceError, StorageFullError, StoreError
from serve_app.on_demand.definitions import blob_digest

MAX_UPLOADS = 4
LEASE_S = 60.0
# What a smaller file counts: every file of the store costs time in each sweep.
LEAST_COUNTED_BYTES = 1 << 20


@dataclass(frozen=True, slots=True)
class UploadLimits:
    """`file_bytes`: limit of one file. `quota_bytes`: limit of a tenant's files that no model uses
    yet, counted since the process started; each counts `LEAST_COUNTED_BYTES` at least."""

    file_bytes: int
    quota_bytes: int


@dataclass(slots=True)
class _Upload:
    digest: str
    tenant: str
    path: Path
    touched_at: float
    size: int = 0
    hash: Any = field(default_factory=hashlib.sha256)
    lock: Lock = field(default_factory=Lock)  # guards the file


class Uploads:
    """The running uploads. Thread-safe. An upload that receives no piece for `LEASE_S` is dropped;
    `clock` returns seconds."""

    def __init__(
        self, store: Store, limits: UploadLimits, *, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._store = store
        self._limits = limits
        self._clock = clock
        self._uploads: dict[str, _Upload] = {}
        self._finished: dict[str, dict[str, int]] = {}  # for each tenant, bytes by digest
        self._lock = Lock()  # guards both dictionaries

    @property
    def running(self) -> int:
        """The number of uploads that have not ended."""
        return len(self._uploads)

    def begin(self, id: str, digest: str, size: int | None, tenant: str) -> None:
        """Begins upload `id`; `size` in bytes, None if unknown.

        RequestError if the file is too large, StorageFullError if it exceeds the disk or the quota,
        OverloadedError if too many uploads are running.
        """
        self.drop_stale()
        digest = blob_digest(digest)
        self._check_size(size or 0)
        self._check_quota(tenant, _counted(size or 0))
        self._store.check_space([ManifestLayer("", digest, size or 0)])
        # Files with such names are removed by `remove_unused` if the process is killed.
        path = self._store.partial(digest).with_suffix(f".{id}")
        with self._lock:
            if len(self._uploads) >= MAX_UPLOADS:
                raise OverloadedError(
                    f"{MAX_UPLOADS} uploads are already running, which is the limit; try again "
                    "later"
                )
            self._uploads[id] = _Upload(digest, tenant, path, self._clock())
        try:
            path.touch()
        except OSError as error:
            self.abort(id)
            raise file_error("write", path, error) from error

    def append(self, id: str, offset: int, data: bytes) -> None:
        """Append a piece. Raises the errors of `begin`, after dropping the upload."""
        upload = self._known(id)
        with upload.lock:
            self._known(id)  # another thread may have dropped it meanwhile
            try:
                self._append(upload, offset, data)
            except BaseException:
                self._drop(id, upload)
                raise

    def finish(self, id: str) -> None:
        """Turns the upload into a blob. RequestError if the bytes do not match the digest; they are
        then dropped."""
        upload = self._known(id)
        with upload.lock:
            self._known(id)
            try:
                self._install(upload)
            finally:
                self._drop(id, upload)
        with self._lock:
            self._finished.setdefault(upload.tenant, {})[upload.digest] = upload.size

    def abort(self, id: str) -> None:
        """Removes the upload's bytes; does nothing if it has ended already."""
        upload = self._uploads.get(id)
        if upload is not None:
            with upload.lock:
                self._drop(id, upload)

    def drop_stale(self) -> None:
        """Drops uploads without progress."""
        oldest = self._clock() - LEASE_S
        for id, upload in list(self._uploads.items()):
            if upload.lock.acquire(blocking=False):  # otherwise a thread is writing the file
                try:
                    if upload.touched_at < oldest:
                        self._drop(id, upload)
                finally:
                    upload.lock.release()

    def forget_used(self) -> None:
        """Stop counting files against quotas that a model uses or that were removed."""
        try:
            used = self._store.used()
        except (SourceError, StoreError):
            return  # a manifest is damaged or removed now, so the blobs of its model are unknown
        with self._lock:
            for tenant, files in list(self._finished.items()):
                left = {d: size for d, size in files.items() if d not in used and self._has(d)}
                self._finished[tenant] = left
                if not left:
                    del self._finished[tenant]

    def close(self) -> None:
        for id in list(self._uploads):
            self.abort(id)

    def _append(self, upload: _Upload, offset: int, data: bytes) -> None:
        if offset != upload.size:
            raise RequestError(f"the upload has {upload.size:,} bytes, not {offset:,}; restart it")
        self._check_size(offset + len(data))
        more = _counted(offset + len(data)) - _counted(offset)
        self._check_quota(upload.tenant, more)
        self._store.check_free(len(data))
        try:
            with upload.path.open("ab") as file:
                file.write(data)
        except OSError as error:
            raise file_error("write", upload.path, error) from error
        upload.hash.update(data)
        upload.size += len(data)
        upload.touched_at = self._clock()

    def _install(self, upload: _Upload) -> None:
        found = f"sha256:{upload.hash.hexdigest()}"
        if found != upload.digest:
            raise RequestError(f'digest mismatch, expected "{upload.digest}", got "{found}"')
        layer = ManifestLayer("", upload.digest, upload.size)
        try:
            with self._store.blob_lock(upload.digest):
                if not self._store.holds(layer):
                    with upload.path.open("rb") as file:
                        os.fsync(file.fileno())
                    upload.path.replace(self._store.blob(upload.digest))
        except OSError as error:
            raise file_error("write", upload.path, error) from error

    def _known(self, id: str) -> _Upload:
        upload = self._uploads.get(id)
        if upload is None:
            raise RequestError("the upload is unknown or was dropped; restart it")
        return upload

    def _drop(self, id: str, upload: _Upload) -> None:
        """The caller holds the upload's lock, so no other thread writes the file."""
        with self._lock:
            self._uploads.pop(id, None)
        upload.path.unlink(missing_ok=True)

    def _has(self, digest: str) -> bool:
        return self._store.blob(digest).is_file()

    def _check_size(self, size: int) -> None:
        limit = self._limits.file_bytes
        if size > limit:
            raise RequestError(
                f"the file has more than {limit:,} bytes (`on_demand.max_upload_bytes`)"
            )

    def _check_quota(self, tenant: str, more: int) -> None:
        limit = self._limits.quota_bytes
        if self._unused_bytes(tenant) + more <= limit:
            return
        self.forget_used()
        unused = self._unused_bytes(tenant)
        if unused + more > limit:
            raise StorageFullError(
                f"{unused:,} bytes that you uploaded are not part of any model yet; {more:,} more "
                f"would exceed {limit:,} (`on_demand.upload_quota_bytes`). Create models from "
                "them; files that no model uses are removed after a day."
            )

    def _unused_bytes(self, tenant: str) -> int:
        """What the tenant's running and finished uploads count."""
        with self._lock:
            running = [each.size for each in self._uploads.values() if each.tenant == tenant]
            return sum(map(_counted, [*running, *self._finished.get(tenant, {}).values()]))


def _counted(size: int) -> int:
    return max(size, LEAST_COUNTED_BYTES)
