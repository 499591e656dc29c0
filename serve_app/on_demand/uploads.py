"""Files that clients bring, piece by piece, until they are blobs of the store."""

import hashlib
import os
import time
import uuid
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from model_zoo.store.manifest import Layer
from model_zoo.store.store import Store, file_error
from runtime.errors import OverloadedError, RequestError
from serve_app.on_demand.definitions import blob_digest

MOST_AT_ONCE = 4
LEASE_S = 60.0


@dataclass(slots=True)
class _Upload:
    digest: str
    path: Path
    touched_at: float
    size: int = 0
    hash: Any = field(default_factory=hashlib.sha256)


class Uploads:
    """`max_bytes`: of one file. One that gets no piece for `lease_s` is given up."""

    def __init__(self, store: Store, *, max_bytes: int, lease_s: float = LEASE_S) -> None:
        self._store = store
        self._max_bytes = max_bytes
        self._lease_s = lease_s
        self._uploads: dict[str, _Upload] = {}

    def begin(self, digest: str, size: int | None) -> str:
        """The upload's id. RequestError when it would be too large, StoreError without room."""
        self._give_up_old()
        blob_digest(digest)
        self._check_size(size or 0)
        if len(self._uploads) >= MOST_AT_ONCE:
            raise OverloadedError(f"{MOST_AT_ONCE} files are being uploaded already")
        self._store.check_room([Layer("", digest, size or 0)])
        id = uuid.uuid4().hex
        # Named so that `remove_unused` clears away what a process has left behind.
        path = self._store.partial(digest).with_suffix(f".{id}")
        try:
            path.touch()
        except OSError as error:
            raise file_error("write", path, error) from error
        self._uploads[id] = _Upload(digest, path, time.monotonic())
        return id

    def append(self, id: str, offset: int, data: bytes) -> None:
        upload = self._known(id)
        if offset != upload.size:
            self._drop(id)
            raise RequestError(f"the upload has {upload.size:,} bytes, not {offset:,}; begin anew")
        try:
            self._check_size(offset + len(data))
            with upload.path.open("ab") as file:
                file.write(data)
        except OSError as error:
            self._drop(id)
            raise file_error("write", upload.path, error) from error
        except RequestError:
            self._drop(id)
            raise
        upload.hash.update(data)
        upload.size += len(data)
        upload.touched_at = time.monotonic()

    def finish(self, id: str) -> None:
        """RequestError when what came is not what its digest says; then it is dropped."""
        upload = self._known(id)
        del self._uploads[id]
        found = f"sha256:{upload.hash.hexdigest()}"
        try:
            if found != upload.digest:
                raise RequestError(f'digest mismatch, expected "{upload.digest}", got "{found}"')
            layer = Layer("", upload.digest, upload.size)
            with self._store.blob_lock(upload.digest):
                if not self._store.holds(layer):
                    with upload.path.open("rb") as file:
                        os.fsync(file.fileno())
                    upload.path.replace(self._store.blob(upload.digest))
        except OSError as error:
            raise file_error("write", upload.path, error) from error
        finally:
            upload.path.unlink(missing_ok=True)

    def close(self) -> None:
        for id in list(self._uploads):
            self._drop(id)

    def _known(self, id: str) -> _Upload:
        upload = self._uploads.get(id)
        if upload is None:
            raise RequestError("the upload is not known any more; begin anew")
        return upload

    def _drop(self, id: str) -> None:
        """Another thread may have done so already."""
        upload = self._uploads.pop(id, None)
        if upload is not None:
            upload.path.unlink(missing_ok=True)

    def _give_up_old(self) -> None:
        now = time.monotonic()
        for id, upload in list(self._uploads.items()):
            if now - upload.touched_at > self._lease_s:
                self._drop(id)

    def _check_size(self, size: int) -> None:
        if size > self._max_bytes:
            raise RequestError(
                f"the file has more than {self._max_bytes:,} bytes (`on_demand.max_upload_bytes`)"
            )
