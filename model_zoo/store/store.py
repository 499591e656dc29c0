"""The store of models: blobs by their SHA-256, manifests by name, shared by many processes.

Whatever is under its final name is whole: files are written elsewhere and renamed.
"""

import errno
import hashlib
import os
import re
import shutil
import time
import uuid
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from tempfile import NamedTemporaryFile, TemporaryDirectory

from filelock import FileLock, Timeout

from model_zoo.store.manifest import MAX_MANIFEST_BYTES, Layer, Manifest, check_digest
from model_zoo.store.model_name import ModelName
from runtime.errors import SourceError, StorageFullError, StoreError

PARTIAL = "-partial"
JOURNAL = "-journal"
WORKPLACE = ".creating-"
UNUSED_AGE_S = 24 * 3600.0
WAITING_S = 0.5
LEFT_FREE_BYTES = 64 << 20
MAX_TEXT_BYTES = 16 << 20
_BLOB = re.compile(r"sha256-[0-9a-f]{64}")


@dataclass(frozen=True, slots=True)
class StoredModel:
    """A model whose blobs are all here.

    `files`: the GGUF file, or all parts of a split one, in order; `projectors` likewise.
    """

    name: ModelName
    manifest: Manifest
    files: tuple[Path, ...]
    projectors: tuple[Path, ...]
    modified_at: float


class Store:
    """A folder of models; nothing is created before something is written.

    `clock` gives the seconds since 1970.
    """

    def __init__(self, root: Path, *, clock: Callable[[], float] = time.time) -> None:
        self.root = root
        self._clock = clock
        self._blobs = root / "blobs"
        self._manifests = root / "manifests"
        self._views = root / "views"
        self._locks = root / "locks"

    def names(self) -> list[ModelName]:
        """Of every manifest here; files that cannot be one are passed over."""
        found = []
        for path in sorted(self._manifests.glob("*/*/*/*")):
            with suppress(SourceError):
                found.append(ModelName(*path.relative_to(self._manifests).parts))
        return found

    def find(self, name: ModelName) -> ModelName | None:
        """The name as it is spelt here; case does not tell names apart."""
        if self.manifest_path(name).is_file():
            return name
        wanted = [part.lower() for part in name.parts]
        alike = (known for known in self.names() if [p.lower() for p in known.parts] == wanted)
        return next(alike, None)

    def manifest(self, name: ModelName) -> Manifest:
        """StoreError when there is none of that name."""
        path = self.manifest_path(self._known(name, "; pull it first"))
        try:
            with path.open("rb") as file:
                raw = file.read(MAX_MANIFEST_BYTES + 1)
        except OSError as error:
            raise file_error("read", path, error) from error
        return Manifest.parse(raw, origin=str(path))

    def open(self, name: ModelName) -> StoredModel:
        """The model; StoreError when it is not here, or not whole."""
        manifest = self.manifest(name)
        known = self.find(name) or name
        missing = self.missing(manifest)
        if missing:
            raise StoreError(f"{known}: blob {missing[0].digest} is missing; pull the model again.")
        files = tuple(self._file(known, layer) for layer in manifest.of_kind("model"))
        if not files:
            raise StoreError(f"{known}: has no layer with a model in GGUF; it cannot be served.")
        projectors = tuple(self._file(known, layer) for layer in manifest.of_kind("projector"))
        modified_at = self.manifest_path(known).stat().st_mtime
        return StoredModel(known, manifest, files, projectors, modified_at)

    def blob(self, digest: str) -> Path:
        """Where the blob is, or will be."""
        return self._blobs / check_digest(digest).replace(":", "-")

    def partial(self, digest: str) -> Path:
        """Where the blob is gathered, by whoever holds its lock."""
        path = self.blob(digest)
        self._make(self._blobs)
        return path.with_name(path.name + PARTIAL)

    def holds(self, layer: Layer) -> bool:
        """Whether the blob is here, with the right size; `damaged` reads it."""
        try:
            return self.blob(layer.digest).stat().st_size == layer.size
        except OSError:
            return False

    def missing(self, manifest: Manifest) -> list[Layer]:
        return [layer for layer in manifest.blobs if not self.holds(layer)]

    def check_room(self, layers: Iterable[Layer]) -> None:
        """StorageFullError unless the disk has room for what of these blobs is not here yet."""
        lacking = (layer for layer in layers if not self.holds(layer))
        needed = sum(max(0, layer.size - _taken(self.partial(layer.digest))) for layer in lacking)
        if needed:
            self.check_free(needed)

    def check_free(self, needed: int) -> None:
        """StorageFullError unless so many bytes can be written and `LEFT_FREE_BYTES` stay free."""
        free = shutil.disk_usage(self._blobs).free
        if needed + LEFT_FREE_BYTES > free:
            raise StorageFullError(
                f"{self.root}: the disk has {free:,} bytes free; {needed:,} are still to come, and "
                f"{LEFT_FREE_BYTES:,} stay free. Make room, or set CARAVAN_MODELS to another disk."
            )

    def text(self, layer: Layer) -> str:
        """A layer such as a template or a licence."""
        if layer.size > MAX_TEXT_BYTES:
            raise StoreError(f"{layer.digest} has {layer.size:,} bytes; no text is that long.")
        try:
            return self.blob(layer.digest).read_text(encoding="utf-8", errors="replace")
        except OSError as error:
            raise file_error("read", self.blob(layer.digest), error) from error

    @contextmanager
    def blob_lock(
        self, digest: str, *, waiting: Callable[[], None] = lambda: None
    ) -> Iterator[None]:
        """Only one process at a time gathers a blob; the others wait here, and say so."""
        with self._lock(check_digest(digest).replace(":", "-"), waiting):
            yield

    def keep(self, layer: Layer) -> None:
        """Make a gathered file the blob, if it is what its digest says; else it is dropped."""
        partial = self.partial(layer.digest)
        found = digest_of(partial)
        try:
            if found == layer.digest:
                with partial.open("rb") as file:
                    os.fsync(file.fileno())
                partial.replace(self.blob(layer.digest))
            partial.unlink(missing_ok=True)
            journal_of(partial).unlink(missing_ok=True)
        except OSError as error:
            raise file_error("write", partial, error) from error
        if found != layer.digest:
            raise SourceError(
                f"What came has the digest {found}, not {layer.digest}; it was dropped. Try again."
            )

    def temporary(self) -> Path:
        """A new name among the blobs; `remove_unused` clears away what a process leaves there."""
        self._make(self._blobs)
        return self._blobs / f"sha256-{uuid.uuid4().hex}{PARTIAL}"

    @contextmanager
    def workplace(self) -> Iterator[Path]:
        """A folder on the store's disk, removed at the end, or else by `remove_unused`."""
        with TemporaryDirectory(dir=self.root, prefix=WORKPLACE) as folder:
            yield Path(folder)

    def place(self, temporary: Path, layer: Layer) -> None:
        """Make a `temporary` file the blob, unless that is here already."""
        with self.blob_lock(layer.digest):
            if not self.holds(layer):
                temporary.replace(self.blob(layer.digest))

    def linked(self, path: Path) -> str | None:
        """The digest of the blob that this file is, by a hard link or its own place."""
        for blob in self._blobs.glob("sha256-*"):
            with suppress(OSError):  # another process may remove it now
                if _BLOB.fullmatch(blob.name) and blob.samefile(path):
                    return blob.name.replace("-", ":")
        return None

    def link(self, layer: Layer, origin: Path) -> None:
        """A blob that is elsewhere on this machine already: a hard link, or else a reference."""
        origin = origin.resolve()
        temporary = self.partial(layer.digest).with_suffix(f".{os.getpid()}")
        try:
            temporary.unlink(missing_ok=True)
            try:
                os.link(origin, temporary)
            except OSError:  # another file system, or a file that is not ours
                temporary.symlink_to(origin)
            temporary.replace(self.blob(layer.digest))
            # Renaming one link of a file over another leaves both.
            temporary.unlink(missing_ok=True)
        except OSError as error:
            raise file_error("write", temporary, error) from error

    def commit(self, name: ModelName, manifest: Manifest) -> StoredModel:
        """The name now means this manifest; StoreError unless all its blobs are here."""
        with self._lock("store"):
            known = self.find(name) or name
            missing = self.missing(manifest)
            if missing:
                raise StoreError(f"{name}: blob {missing[0].digest} is missing from the store.")
            self._view(known, manifest)
            self._write(self.manifest_path(known), manifest.raw)
            return self.open(known)

    def remove(self, name: ModelName) -> int:
        """Forget the model; the bytes of blobs that went with it, as no other model uses them.

        None go while another manifest is damaged, since what that one uses is not known.
        """
        self._known(name)  # first without a lock, which would be written
        with self._lock("store"):
            known = self._known(name)
            path = self.manifest_path(known)
            own: list[Layer] = []
            with suppress(SourceError):  # a damaged manifest can be removed too
                own = [layer for layer in self.manifest(known).blobs if self.holds(layer)]
            try:
                path.unlink()
                self._clear_view(known)
                _remove_empty_folders(path.parent, self._manifests)
                freed = self._unused(own)
                for layer in freed:
                    self.blob(layer.digest).unlink(missing_ok=True)
            except OSError as error:
                raise file_error("remove", path, error) from error
        return sum(layer.size for layer in freed)

    def remove_unused(self, *, older_than_s: float = UNUSED_AGE_S) -> int:
        """Removes blobs that no model uses, downloads without progress and what processes that were
        killed have left; the bytes freed.

        While a download makes progress, whole blobs stay: they may belong to the same model, which
        has no manifest yet. SourceError when a manifest is damaged.
        """
        if not self._blobs.is_dir():
            return 0
        freed, oldest = 0, self._clock() - older_than_s
        with self._lock("store"):
            used = {digest.replace(":", "-") for digest in self.used()}
            changes = self._changes()
            old = {path for path, changed_at in changes.items() if changed_at <= oldest}
            downloading = any(path.name.endswith(PARTIAL) for path in changes.keys() - old)
            for path in old:
                if path.name not in used and not (downloading and _BLOB.fullmatch(path.name)):
                    freed += _taken(path)
                    path.unlink(missing_ok=True)
            return freed + self._remove_workplaces(oldest)

    def used(self) -> set[str]:
        """Digests of the blobs of all models. SourceError when a manifest is damaged: what its
        model uses is not known."""
        return {layer.digest for name in self.names() for layer in self.manifest(name).blobs}

    def damaged(self, manifest: Manifest) -> Iterator[tuple[Layer, bool]]:
        """Each blob, read to its end, and whether it is missing or not what its digest says."""
        for layer in manifest.blobs:
            yield layer, self._is_damaged(layer)

    def discard(self, layer: Layer) -> bool:
        """Drop a blob that was found damaged, so that the next pull brings it anew.

        False, and it stays, where it is sound: another process has repaired it meanwhile.
        """
        with self.blob_lock(layer.digest):
            damaged = self._is_damaged(layer)
            if damaged:
                self.blob(layer.digest).unlink(missing_ok=True)
            return damaged

    def _is_damaged(self, layer: Layer) -> bool:
        return not self.holds(layer) or digest_of(self.blob(layer.digest)) != layer.digest

    def _known(self, name: ModelName, advice: str = "") -> ModelName:
        known = self.find(name)
        if known is None:
            raise StoreError(f"There is no {name} in the store {self.root}{advice}.")
        return known

    def _changes(self) -> dict[Path, float]:
        """All blobs, whole and partial, and when each was changed last.

        Of the file, not of its content: a link to an old file is young.
        """
        found = {}
        for path in self._blobs.glob("sha256-*"):
            with suppress(FileNotFoundError):  # another process has renamed it
                found[path] = path.lstat().st_ctime
        return found

    def _remove_workplaces(self, oldest: float) -> int:
        freed = 0
        for folder in self.root.glob(f"{WORKPLACE}*"):
            held = [folder, *folder.rglob("*")]
            with suppress(FileNotFoundError):  # its process is at work
                if max(path.lstat().st_ctime for path in held) <= oldest:
                    freed += sum(map(_taken, held))
                    shutil.rmtree(folder)
        return freed

    def _unused(self, layers: Iterable[Layer]) -> list[Layer]:
        try:
            used = self.used()
        except (SourceError, StoreError):
            return []
        return [layer for layer in layers if layer.digest not in used]

    def manifest_path(self, name: ModelName) -> Path:
        return self._manifests.joinpath(*name.parts)

    def _file(self, name: ModelName, layer: Layer) -> Path:
        if layer.title is None:
            return self.blob(layer.digest)
        return self._views.joinpath(*name.parts, layer.title)

    def _view(self, name: ModelName, manifest: Manifest) -> None:
        """The blobs under the names that their files had; parts of a split file need them."""
        for layer in manifest.layers:
            if layer.title is None:
                continue
            path = self._file(name, layer)
            self._make(path.parent)
            temporary = path.with_name(f".{layer.digest[7:23]}")
            try:
                temporary.unlink(missing_ok=True)
                temporary.symlink_to(os.path.relpath(self.blob(layer.digest), path.parent))
                temporary.replace(path)
            except OSError as error:
                raise file_error("write", path, error) from error

    def _clear_view(self, name: ModelName) -> None:
        folder = self._views.joinpath(*name.parts)
        for link in folder.glob("*"):
            link.unlink()
        _remove_empty_folders(folder, self._views)

    def _write(self, path: Path, content: bytes) -> None:
        self._make(path.parent)
        self._make(self._locks)
        try:
            with NamedTemporaryFile(dir=self._locks, prefix="writing-", delete=False) as file:
                try:
                    file.write(content)
                    file.flush()
                    os.fsync(file.fileno())
                    os.chmod(file.name, 0o644)
                    os.replace(file.name, path)
                except OSError:
                    os.unlink(file.name)
                    raise
        except OSError as error:
            raise file_error("write", path, error) from error

    @contextmanager
    def _lock(self, name: str, waiting: Callable[[], None] = lambda: None) -> Iterator[None]:
        self._make(self._locks)
        path = self._locks / f"{name}.lock"
        lock = FileLock(path)
        while not lock.is_locked:
            try:
                lock.acquire(timeout=WAITING_S)
            except Timeout:
                waiting()
            except (OSError, NotImplementedError) as error:
                raise StoreError(
                    f"{path}: cannot be locked ({error}); put the store, CARAVAN_MODELS, on a "
                    "file system that this user may write and that knows locks."
                ) from error
        try:
            yield
        finally:
            lock.release()

    def _make(self, folder: Path) -> None:
        try:
            folder.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise file_error("make", folder, error) from error


def default_root(environment: Mapping[str, str]) -> Path:
    """`$CARAVAN_MODELS`, or else ~/.caravan/models."""
    return Path(environment.get("CARAVAN_MODELS") or "~/.caravan/models").expanduser()


def journal_of(partial: Path) -> Path:
    """What of a gathered file is there already, so that a later process can go on."""
    return partial.with_name(partial.name + JOURNAL)


def digest_of(path: Path) -> str:
    try:
        with path.open("rb") as file:
            return f"sha256:{hashlib.file_digest(file, 'sha256').hexdigest()}"
    except OSError as error:
        raise file_error("read", path, error) from error


def _remove_empty_folders(folder: Path, root: Path) -> None:
    while folder != root:
        try:
            folder.rmdir()
        except OSError:
            return
        folder = folder.parent


def file_error(verb: str, path: Path, error: OSError) -> StoreError:
    if error.errno in (errno.ENOSPC, errno.EDQUOT):
        return StorageFullError(f"{path}: cannot {verb} it: the disk is full.")
    return StoreError(f"{path}: cannot {verb} it: {error.strerror}.")


def _taken(path: Path) -> int:
    """Bytes of disk that the file has taken, holes in it left out; 0 when there is none."""
    try:
        return path.lstat().st_blocks * 512
    except OSError:
        return 0
