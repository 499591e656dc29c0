"""The store of models: blobs by SHA-256, manifests by name; several processes may use it at once.

Every file under its final name is complete: files are written under other names and renamed.
"""

import hashlib
import math
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
from typing import BinaryIO

from model_zoo.gguf.adapter_path import AdapterPath
from model_zoo.store.file_access import (
    disk_bytes,
    file_error,
    file_errors,
    manifest_paths,
    remove_empty_folders,
)
from model_zoo.store.locks import StoreLocks
from model_zoo.store.manifest import (
    MAX_MANIFEST_BYTES,
    MAX_TEXT_BYTES,
    Manifest,
    ManifestLayer,
    check_digest,
)
from model_zoo.store.model_name import ModelName
from model_zoo.store.views import Views
from runtime.errors import SourceError, StorageFullError, StoreError
from runtime.home_directory import expanded
from runtime.mapped_removal import remove_unmapped

PARTIAL = "-partial"
JOURNAL = "-journal"
TEMPORARY_FOLDER = ".creating-"
UNUSED_AGE_S = 24 * 3600.0
LEFT_FREE_BYTES = 64 << 20
_BLOB = re.compile(r"sha256-[0-9a-f]{64}")


@dataclass(frozen=True, slots=True)
class StoredModel:
    """A complete model.

    `files`: the GGUF file, or all parts of a split one in order. `projectors`, `adapters`: the
    files of these, in the manifest's order.
    """

    name: ModelName
    manifest: Manifest
    files: tuple[Path, ...]
    projectors: tuple[Path, ...]
    modified_at: float
    adapters: tuple[AdapterPath, ...] = ()


@dataclass(frozen=True, slots=True)
class Removal:
    """`freed_bytes`: of the blobs that were removed. `mapped`: unused blobs that a process maps;
    they are still there."""

    freed_bytes: int
    mapped: tuple[ManifestLayer, ...]


class Store:
    """A folder of models; it is created with the first write.

    `clock` returns seconds since 1970.
    """

    def __init__(self, root: Path, *, clock: Callable[[], float] = time.time) -> None:
        self.root = root
        self._clock = clock
        self._blobs = root / "blobs"
        self._manifests = root / "manifests"
        self._views = Views(root / "views", self.blob)
        self._locks = StoreLocks(root / "locks")

    def names(self, *, all_readable: bool = False) -> list[ModelName]:
        """The names of all manifests; other files are ignored. StoreError as of `manifest_paths`;
        by default one folder that cannot be read does not conceal the models in others."""
        found = []
        for path in manifest_paths(self._manifests, all_readable=all_readable):
            with suppress(SourceError):
                found.append(ModelName(*path.relative_to(self._manifests).parts))
        return found

    def find(self, name: ModelName) -> ModelName | None:
        """The name in the spelling of the store, None if absent; case is ignored. StoreError as of
        `names`."""
        path = self.manifest_path(name)
        try:
            if path.is_file():
                return name
        except OSError as error:
            raise file_error("read", path, error) from error
        wanted = [part.lower() for part in name.parts]
        alike = (known for known in self.names() if [p.lower() for p in known.parts] == wanted)
        return next(alike, None)

    def manifest(self, name: ModelName) -> Manifest:
        """The manifest of that name; StoreError if there is none."""
        path = self.manifest_path(self._existing(name, "; pull it first"))
        try:
            with path.open("rb") as file:
                raw = file.read(MAX_MANIFEST_BYTES + 1)
        except OSError as error:
            raise file_error("read", path, error) from error
        return Manifest.parse(raw, origin=str(path))

    def open(self, name: ModelName) -> StoredModel:
        """The model. StoreError if it is absent or incomplete."""
        manifest = self.manifest(name)
        known = self.find(name) or name
        missing = self.missing(manifest)
        if missing:
            raise StoreError(f"{known}: blob {missing[0].digest} is missing; pull the model again.")
        named = {layer: self._views.file(known, manifest, layer) for layer in manifest.layers}
        files = tuple(named[layer] for layer in manifest.of_kind("model"))
        if not files:
            raise StoreError(f"{known}: has no layer with a GGUF model; it cannot be served.")
        if not all(map(os.path.lexists, named.values())):
            raise StoreError(f"{known}: has no links to its files; pull the model again.")
        projectors = tuple(named[layer] for layer in manifest.of_kind("projector"))
        modified_at = self.manifest_path(known).stat().st_mtime
        adapters = tuple(
            AdapterPath(named[layer], layer.scale) for layer in manifest.of_kind("adapter")
        )
        return StoredModel(known, manifest, files, projectors, modified_at, adapters)

    def blob(self, digest: str) -> Path:
        """The path of the blob, whether or not it exists."""
        return self._blobs / check_digest(digest).replace(":", "-")

    def partial(self, digest: str) -> Path:
        """The path of the incomplete blob; only the holder of its lock may write it."""
        path = self.blob(digest)
        self._make(self._blobs)
        return path.with_name(path.name + PARTIAL)

    def holds(self, layer: ManifestLayer) -> bool:
        """Whether the blob exists with the right size; its content is checked by `discard`."""
        try:
            return self.blob(layer.digest).stat().st_size == layer.size
        except OSError:
            return False

    def missing(self, manifest: Manifest) -> list[ManifestLayer]:
        return [layer for layer in manifest.blobs if not self.holds(layer)]

    def check_space(self, layers: Iterable[ManifestLayer]) -> None:
        """StorageFullError if the disk has no space for the missing bytes of these blobs."""
        lacking = (layer for layer in layers if not self.holds(layer))
        needed = sum(
            max(0, layer.size - disk_bytes(self.partial(layer.digest))) for layer in lacking
        )
        if needed:
            self.check_free(needed)

    def check_free(self, needed: int) -> None:
        """StorageFullError unless `needed` bytes can be written with `LEFT_FREE_BYTES` left."""
        free = shutil.disk_usage(self._blobs).free
        if needed + LEFT_FREE_BYTES > free:
            raise StorageFullError(
                f"{self.root}: the disk has {free:,} bytes free; {needed:,} are needed, and "
                f"{LEFT_FREE_BYTES:,} must stay free. Free some, or set CARAVAN_MODELS to another "
                "disk."
            )

    def text(self, layer: ManifestLayer) -> str:
        """The text of a layer such as a template or a licence."""
        if layer.size > MAX_TEXT_BYTES:
            raise StoreError(
                f"{layer.digest} has {layer.size:,} bytes; the limit for texts is "
                f"{MAX_TEXT_BYTES:,}."
            )
        try:
            return self.blob(layer.digest).read_text(encoding="utf-8", errors="replace")
        except OSError as error:
            raise file_error("read", self.blob(layer.digest), error) from error

    @contextmanager
    def blob_lock(
        self, digest: str, *, waiting: Callable[[], None] = lambda: None
    ) -> Iterator[None]:
        """Lets one process at a time write a blob; calls `waiting` if another holds the lock."""
        with self._locks.held(check_digest(digest).replace(":", "-"), waiting):
            yield

    def open_blob(self, digest: str) -> BinaryIO:
        try:
            return self.blob(digest).open("rb")
        except OSError as error:
            raise file_error("read", self.blob(digest), error) from error

    def install_partial(self, layer: ManifestLayer) -> None:
        """Renames the partial file to the blob. If its digest is wrong, removes it and raises
        SourceError."""
        partial = self.partial(layer.digest)
        found = digest_of(partial)
        try:
            if found == layer.digest:
                _sync(partial)
                partial.replace(self.blob(layer.digest))
            partial.unlink(missing_ok=True)
            journal_of(partial).unlink(missing_ok=True)
        except OSError as error:
            raise file_error("write", partial, error) from error
        if found != layer.digest:
            raise SourceError(
                f"The received blob has the digest {found}, not {layer.digest}; it was removed. "
                "Try again."
            )

    def temporary(self) -> Path:
        """A new path beside the blobs; `remove_unused` removes what a process leaves there."""
        self._make(self._blobs)
        return self._blobs / f"sha256-{uuid.uuid4().hex}{PARTIAL}"

    @contextmanager
    def temporary_folder(self) -> Iterator[Path]:
        """A folder on the store's disk; `remove_unused` removes it if the process is killed."""
        self._make(self.root)
        with TemporaryDirectory(dir=self.root, prefix=TEMPORARY_FOLDER) as folder:
            yield Path(folder)

    def install(self, temporary: Path, layer: ManifestLayer) -> None:
        """Renames a `temporary` file to the blob, unless the blob exists. OSError if it cannot be
        written to the disk."""
        with self.blob_lock(layer.digest):
            if not self.holds(layer):
                _sync(temporary)
                temporary.replace(self.blob(layer.digest))

    def find_linked(self, path: Path) -> str | None:
        """The digest of the blob that is the same file, e.g. by a hard link; None if there is
        none."""
        for blob in self._blobs.glob("sha256-*"):
            with suppress(OSError):  # another process may remove it now
                if _BLOB.fullmatch(blob.name) and blob.samefile(path):
                    return blob.name.replace("-", ":")
        return None

    def link(self, layer: ManifestLayer, origin: Path) -> None:
        """Links a file elsewhere on this machine as the blob: by a hard link if possible, else by a
        symbolic one."""
        origin = origin.resolve()
        temporary = self.partial(layer.digest).with_suffix(f".{os.getpid()}")
        try:
            temporary.unlink(missing_ok=True)
            try:
                os.link(origin, temporary)
            except OSError:  # another file system, or no permission
                temporary.symlink_to(origin)
            temporary.replace(self.blob(layer.digest))
            # Renaming a hard link over another link of the same file keeps both.
            temporary.unlink(missing_ok=True)
        except OSError as error:
            raise file_error("write", temporary, error) from error

    def commit(self, name: ModelName, manifest: Manifest) -> StoredModel:
        """Assigns the manifest to the name. StoreError if a blob is missing."""
        with self._locks.held("store"):
            known = self.find(name) or name
            missing = self.missing(manifest)
            if missing:
                raise StoreError(f"{name}: blob {missing[0].digest} is missing from the store.")
            self._views.write(known, manifest)  # before a process finds the manifest
            self._write(self.manifest_path(known), manifest.raw)
            return self.open(known)

    def remove(self, name: ModelName) -> Removal:
        """Removes the model and the blobs that no other model uses and no process maps.

        While another manifest is damaged, no blobs are removed: that model may use them.
        """
        self._existing(name)  # checked before the lock, whose file would be created
        with self._locks.held("store"):
            known = self._existing(name)
            path = self.manifest_path(known)
            own: tuple[ManifestLayer, ...] = ()
            with suppress(SourceError):  # also removes a damaged manifest
                own = self.manifest(known).blobs
            with file_errors("remove", path):
                path.unlink()
                self._views.remove(known)
                remove_empty_folders(path.parent, self._manifests)
                return self._remove_blobs(own)

    def remove_blobs(self, layers: Iterable[ManifestLayer]) -> Removal:
        """Removes those of the blobs that no model uses and no process maps."""
        with self._locks.held("store"), file_errors("remove", self._blobs):
            return self._remove_blobs(layers)

    def _remove_blobs(self, layers: Iterable[ManifestLayer]) -> Removal:
        unused = self._unused(layer for layer in layers if self.holds(layer))
        mapped = tuple(each for each in unused if not remove_unmapped(self.blob(each.digest)))
        self._remove_locks()
        return Removal(sum(layer.size for layer in set(unused) - set(mapped)), mapped)

    def remove_unused(self, *, older_than_s: float = UNUSED_AGE_S) -> int:
        """Removes blobs that no model uses, downloads without progress and files of killed
        processes, except what a process maps. Returns the bytes freed.

        While a download makes progress, complete blobs stay: they may belong to the same model,
        which has no manifest yet. SourceError if a manifest is damaged, StoreError if a file cannot
        be removed.
        """
        if not self._blobs.is_dir():
            return 0
        oldest = self._clock() - older_than_s
        with self._locks.held("store"), file_errors("remove", self.root):
            versions = self._versions()
            freed = self._remove_old(oldest, _digests(versions.values()))
            self._views.remove_others(versions)
            self._remove_locks()
            return freed + self._remove_temporary_folders(oldest)

    def _remove_old(self, oldest: float, used: set[str]) -> int:
        """Removes files that did not change since `oldest`, except `used` blobs and those that a
        process is writing: before its first byte, a resumed download changes nothing."""
        changes = self._changes()
        old = {path for path, changed_at in changes.items() if changed_at <= oldest}
        blobs = {path for path in old if _BLOB.fullmatch(path.name)}
        downloading = any(path.name.endswith(PARTIAL) for path in changes.keys() - old)
        freed = 0
        for path in sorted(old - blobs):
            with self._locks.held_at_once(path.name.partition(PARTIAL)[0]) as held:
                downloading |= not held
                if held and self._changed_at(path) <= oldest:
                    freed += _remove(path)
        unused = blobs - {self.blob(digest) for digest in used}
        return freed + sum(map(_remove, () if downloading else unused))

    def used(self) -> set[str]:
        """Digests of the blobs of all models. SourceError if a manifest is damaged, so that the
        blobs of its model are unknown."""
        return _digests(self._versions().values())

    def _versions(self) -> dict[ModelName, Manifest]:
        return {name: self.manifest(name) for name in self.names(all_readable=True)}

    def discard(self, layer: ManifestLayer) -> bool:
        """Removes a damaged blob, so that the next pull downloads it.

        False if it is not damaged any more: another process has repaired it.
        """
        with self.blob_lock(layer.digest):
            damaged, path = self._is_damaged(layer), self.blob(layer.digest)
            if damaged and os.path.lexists(path):
                with file_errors("remove", path):
                    aside = path.replace(self.temporary())
                    remove_unmapped(aside)  # otherwise `remove_unused` does it later
            return damaged

    def _is_damaged(self, layer: ManifestLayer) -> bool:
        return not self.holds(layer) or digest_of(self.blob(layer.digest)) != layer.digest

    def _existing(self, name: ModelName, advice: str = "") -> ModelName:
        known = self.find(name)
        if known is None:
            raise StoreError(f"The store {self.root} has no model {name}{advice}.")
        return known

    def _changes(self) -> dict[Path, float]:
        """All complete and partial blobs with the time of their last change."""
        return {path: self._changed_at(path) for path in self._blobs.glob("sha256-*")}

    def _changed_at(self, path: Path) -> float:
        """The time of the directory entry (ctime): a new link to an old file is new. Infinite for
        a file that another process has renamed or removed."""
        try:
            return path.lstat().st_ctime
        except FileNotFoundError:
            return math.inf

    def _remove_locks(self) -> None:
        """Removes the locks of blobs that the store no longer has."""

        def unneeded(name: str) -> bool:
            blob = self._blobs / name
            partial = blob.with_name(blob.name + PARTIAL)
            return not os.path.lexists(blob) and not partial.exists()

        self._locks.remove("sha256-", unneeded)

    def _remove_temporary_folders(self, oldest: float) -> int:
        freed = 0
        for folder in self.root.glob(f"{TEMPORARY_FOLDER}*"):
            held = [folder, *folder.rglob("*")]
            with suppress(FileNotFoundError):  # its process is using it
                if max(path.lstat().st_ctime for path in held) <= oldest:
                    freed += sum(map(disk_bytes, held))
                    shutil.rmtree(folder)
        return freed

    def _unused(self, layers: Iterable[ManifestLayer]) -> list[ManifestLayer]:
        try:
            used = self.used()
        except (SourceError, StoreError):
            return []
        return [layer for layer in layers if layer.digest not in used]

    def manifest_path(self, name: ModelName) -> Path:
        return self._manifests.joinpath(*name.parts)

    def _write(self, path: Path, content: bytes) -> None:
        self._make(path.parent)
        folder = self._locks.folder  # not among the manifests
        self._make(folder)
        try:
            with NamedTemporaryFile(dir=folder, prefix="writing-", delete=False) as file:
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

    def _make(self, folder: Path) -> None:
        try:
            folder.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise file_error("create", folder, error) from error


def default_root(environment: Mapping[str, str]) -> Path:
    """`$CARAVAN_MODELS`, or else ~/.caravan/models."""
    return expanded(environment.get("CARAVAN_MODELS") or "~/.caravan/models")


def journal_of(partial: Path) -> Path:
    """The path of the journal of a partial file; see model_zoo.sources.partial."""
    return partial.with_name(partial.name + JOURNAL)


def _sync(path: Path) -> None:
    """Waits until the content is on the disk, so that a name never outlives it."""
    with path.open("rb") as file:
        os.fsync(file.fileno())


def digest_of(path: Path) -> str:
    try:
        with path.open("rb") as file:
            return f"sha256:{hashlib.file_digest(file, 'sha256').hexdigest()}"
    except OSError as error:
        raise file_error("read", path, error) from error


def _digests(manifests: Iterable[Manifest]) -> set[str]:
    return {layer.digest for manifest in manifests for layer in manifest.blobs}


def _remove(path: Path) -> int:
    """Returns the bytes that the file took on disk, 0 if a process maps it."""
    freed = disk_bytes(path)
    return freed if remove_unmapped(path) else 0
