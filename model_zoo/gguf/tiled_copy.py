"""Copies of the weights of model files in tiles, written once and mapped by all processes.

A copy has the tiles of one tensor after the other, in the order of the file. A copy that has its
final name is complete and never changes. Its name follows from the file's inode, size, time of the
last change and samples of its content, so a file that was changed or replaced gets another one, and
from the types of the tiles. The device is not part of it: that of a network file system changes
with each mount.

Several hosts may share the directory, and the files of one may be absent on the others. So a
description beside each copy states the host that mapped it last and the file's path there: that
host removes the copy when the file has changed or is gone, others when it was not mapped for long.
So are copies whose file has a newer one, such as those of an earlier version or another `compute`.
A copy that a process maps is locked and is not removed, because that would break its mapping on
other hosts of a network file system.
"""

import fcntl
import hashlib
import json
import logging
import mmap
import os
import shutil
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from itertools import chain, starmap
from math import prod
from pathlib import Path

import torch

from model_zoo.gguf.header import TensorInfo
from model_zoo.gguf.mapped import MappedBytes, MappedTensors
from model_zoo.gguf.model_headers import FilePart
from model_zoo.gguf.reader import GGUFFile
from runtime.mapped_removal import remove_unmapped
from runtime.quant.block_types import TILE_ROWS, BlockType
from runtime.quant.weight import to_tiles

_log = logging.getLogger(__name__)

# Smaller models fit into the caches of processors and gain nothing.
LEAST_BYTES = 64 << 20
# Of the disk, left free for others.
SPARE_BYTES = 1 << 30
# Copies of other hosts' files, and of files that have a newer copy, are removed when no process has
# mapped them for so long.
UNUSED_AGE_S = 7 * 24 * 3600.0
_FORMAT = 2
# Bytes of rows that a thread rearranges at once.
_SLAB_BYTES = 4 << 20
# Evenly spaced over a file. They distinguish files of equal inodes, sizes and times on different
# devices, such as versions of a model on read-only images.
_SAMPLES, _SAMPLE_BYTES = 64, 64
_LOCK, _COPY, _UNFINISHED, _SOURCE = "lock", ".tiles", ".unfinished", ".json"
# Matrices whose rows are looked up and never multiplied.
_LOOKED_UP = frozenset(
    f"{name}.weight" for name in ("per_layer_token_embd", "position_embd", "token_types")
)
_EMBEDDING, _HEAD = "token_embd.weight", "output.weight"

# The type of the tiles that take the place of rows of a type; None if there is none.
TiledType = Callable[[BlockType], BlockType | None]
Written = Callable[[str, int], None]


@dataclass(frozen=True, slots=True)
class TilingOptions:
    """Where copies are kept, and for which files.

    least_bytes: a file with fewer bytes of weights that have tiles gets no copy. spare_bytes: bytes
    of the disk that must be free after a copy was written.
    """

    directory: Path
    least_bytes: int = LEAST_BYTES
    spare_bytes: int = SPARE_BYTES


def tiled_tensors(
    file: GGUFFile,
    options: TilingOptions,
    tiled_type: TiledType,
    written: Written = lambda name, nbytes: None,
) -> MappedTensors | None:
    """The tensors of the file that have tiles, as views of mapped copies; None if there are few or
    a copy cannot be written, which is logged.

    written(name, nbytes): called for each part of a tensor that was copied. While another process
    writes a copy into the directory, this one waits.
    """
    types = dict(_suitable(file, tiled_type))
    if sum(file.tensors[name].nbytes for name in types) < max(1, options.least_bytes):
        return None
    copies = [_Copy(part, types, options) for part in file.parts]
    copies = [copy for copy in copies if copy.infos]
    maps = [copy.opened() for copy in copies]
    if None in maps:
        try:
            with _lock(options.directory):
                _write_missing(copies, options, written)
                maps = [copy.opened() for copy in copies]
        except OSError as error:
            reason = error.strerror or error
            _log.warning("Weights are not rearranged into %s: %s.", options.directory, reason)
            return None
    infos: dict[str, TensorInfo] = {}
    by_name: dict[str, MappedBytes] = {}
    for copy, mapped in zip(copies, maps, strict=True):
        if mapped is None:
            return None
        with suppress(OSError):  # the directory may be read-only
            copy.describe()
        infos |= copy.infos
        by_name |= dict.fromkeys(copy.infos, mapped)
    nbytes = sum(copy.nbytes for copy in copies)
    _log.info("Mapped %s bytes of weights in tiles from %s.", f"{nbytes:,}", options.directory)
    return MappedTensors(infos, by_name)


def _suitable(file: GGUFFile, tiled_type: TiledType) -> Iterator[tuple[str, BlockType]]:
    """The matrices that are copied, with the types of their tiles."""
    looked_up = _LOOKED_UP | {_EMBEDDING} if _HEAD in file.tensors else _LOOKED_UP
    for info in file.tensors.values():
        is_matrix = len(info.shape) in (2, 3) and info.shape[-2] % TILE_ROWS == 0 and info.nbytes
        if not is_matrix or info.name in looked_up:
            continue
        type = tiled_type(info.type)
        if type is not None and info.shape[-1] % type.block_elements == 0:
            yield info.name, type


class _Copy:
    """The copy of one file of a model. `types`: of the tiles of the model's tensors; `infos`: the
    tensors of the copy."""

    def __init__(
        self, part: FilePart, types: Mapping[str, BlockType], options: TilingOptions
    ) -> None:
        self.part, self.nbytes = part, 0
        self.infos: dict[str, TensorInfo] = {}
        tensors = sorted(part.header.tensors.values(), key=lambda info: info.begin)
        for info in (info for info in tensors if info.name in types):
            type = types[info.name]
            nbytes = prod(type.data_shape(info.shape))
            self.infos[info.name] = replace(info, type=type, begin=self.nbytes, nbytes=nbytes)
            self.nbytes += nbytes
        stem = options.directory / _name(part, self.infos.values())
        self._path, self._source = stem.with_suffix(_COPY), stem.with_suffix(_SOURCE)
        self._unfinished = stem.with_suffix(_UNFINISHED)

    def opened(self) -> MappedBytes | None:
        """The mapped copy, locked as long as it is mapped; None if there is none."""
        try:
            with self._path.open("rb") as file:
                # The lock belongs to the open file, which the map keeps.
                fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
                if not os.fstat(file.fileno()).st_nlink:  # removed before it was locked
                    return None
                data = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
        except (OSError, ValueError):  # ValueError: an empty file
            return None
        return MappedBytes(self._path, data) if len(data) == self.nbytes else None

    def write(self, written: Written) -> None:
        """Raises OSError if the source has changed or the disk is full; then nothing is left."""
        try:
            with self.part.path.open("rb") as source, self._unfinished.open("wb") as target:
                self._check(os.fstat(source.fileno()))
                self._fill(source.fileno(), target.fileno(), written)
                os.fsync(target.fileno())  # the name must not outlive the content
            self.describe()
            self._unfinished.replace(self._path)
        finally:
            self._unfinished.unlink(missing_ok=True)

    def describe(self) -> None:
        """States that this host has mapped the copy now, and names the source, by which
        `_remove_outdated` finds that it is outdated."""
        stated = {
            "host": os.uname().nodename,
            "path": str(self.part.path.resolve()),
            "state": _state(self.part),
        }
        self._source.write_text(json.dumps(stated))

    def _check(self, status: os.stat_result) -> None:
        if (status.st_dev, *_file_state(status)) != self.part.identity:
            raise OSError(0, f"{self.part.path} has changed")

    def _fill(self, source: int, target: int, written: Written) -> None:
        def copied(slab: "_Slab") -> "_Slab":
            slab.copy(source, target)
            return slab

        with ThreadPoolExecutor(torch.get_num_threads(), "tiles") as threads:
            pairs = [(self.part.header.tensors[name], info) for name, info in self.infos.items()]
            for slab in threads.map(copied, chain.from_iterable(starmap(_slabs, pairs))):
                written(slab.rows.name, slab.nbytes)


@dataclass(frozen=True, slots=True)
class _Slab:
    """Rows of a tensor that are rearranged at once: `nbytes` of the file from byte `begin` of the
    tensor, into those of the copy from byte `at` of the tensor. `rows`, `tiles`: the tensor in the
    file and in the copy."""

    rows: TensorInfo
    tiles: TensorInfo
    begin: int
    nbytes: int
    at: int

    def copy(self, source: int, target: int) -> None:
        """From one file descriptor to the other; OSError if the source ends before."""
        data = bytearray(self.nbytes)
        if os.preadv(source, [data], self.rows.begin + self.begin) < self.nbytes:
            raise OSError(0, f"the file ends within {self.rows.name}")
        row_bytes = self.rows.type.row_bytes(self.rows.shape[-1])
        rows = torch.frombuffer(data, dtype=torch.uint8).view(-1, row_bytes)
        tiles = to_tiles(rows, self.rows.type, self.tiles.type)
        left, at = tiles.numpy().data.cast("B"), self.tiles.begin + self.at
        while left:  # a disk that becomes full first writes a part
            done = os.pwrite(target, left, at)
            left, at = left[done:], at + done


def _slabs(rows: TensorInfo, tiles: TensorInfo) -> Iterator[_Slab]:
    """The rows of all matrices of a tensor, which are whole tiles."""
    each = TILE_ROWS * rows.type.row_bytes(rows.shape[-1])
    count = prod(rows.shape[:-1]) // TILE_ROWS
    tile_bytes, at_once = tiles.nbytes // count, max(1, _SLAB_BYTES // each)
    assert rows.nbytes == count * each, rows.name
    for tile in range(0, count, at_once):
        some = min(at_once, count - tile)
        yield _Slab(rows, tiles, tile * each, some * each, tile * tile_bytes)


def _write_missing(copies: Sequence[_Copy], options: TilingOptions, written: Written) -> None:
    """Writes copies that no other process has written while this one waited for the lock."""
    missing = [copy for copy in copies if copy.opened() is None]
    if not missing:
        return
    _remove_outdated(options.directory, missing)
    needed = sum(copy.nbytes for copy in missing)
    free = shutil.disk_usage(options.directory).free
    if free < needed + options.spare_bytes:
        raise OSError(
            0,
            f"{needed:,} bytes are needed beside {options.spare_bytes:,} that stay free, and "
            f"{free:,} are free",
        )
    begun = time.monotonic()
    for copy in missing:
        copy.write(written)
    seconds = time.monotonic() - begun
    _log.info(
        "Rearranged %s bytes of weights into %s in %.1f s.",
        f"{needed:,}",
        options.directory,
        seconds,
    )


@contextmanager
def _lock(directory: Path) -> Iterator[None]:
    """One process at a time writes and removes copies. The lock ends with the process."""
    directory.mkdir(mode=0o700, parents=True, exist_ok=True)
    with (directory / _LOCK).open("ab") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            _log.info("Waiting for another process that rearranges weights into %s.", directory)
            fcntl.flock(file, fcntl.LOCK_EX)
        yield


def _name(part: FilePart, infos: Iterable[TensorInfo]) -> str:
    """Of the copy with these tensors, without a suffix."""
    types = [(info.name, info.type.id) for info in infos]
    digest = hashlib.sha256(json.dumps([_FORMAT, types, *_state(part)]).encode())
    for number in range(_SAMPLES):
        at = part.size_bytes * number // _SAMPLES
        digest.update(part.map[at : at + _SAMPLE_BYTES])
    return digest.hexdigest()[:32]


def _remove_outdated(directory: Path, missing: Sequence[_Copy]) -> None:
    """Removes the copies whose source has changed or is gone, those that are not used and are of
    other hosts or replaced by a newer copy, and what killed writers left. `missing`: copies that
    are written next."""
    known = [_Description.read(path) for path in directory.glob(f"*{_SOURCE}")]
    newest = {str(copy.part.path.resolve()): time.time() for copy in missing}
    for each in known:
        newest[each.source] = max(each.mapped_at, newest.get(each.source, 0.0))
    for each in known:
        if each.is_outdated(newest[each.source]) and _is_removed(each.path.with_suffix(_COPY)):
            each.path.unlink(missing_ok=True)
            _log.info("Removed the rearranged weights %s, which are outdated.", each.path.stem)
    for unfinished in directory.glob(f"*{_UNFINISHED}"):
        unfinished.unlink()


@dataclass(frozen=True, slots=True)
class _Description:
    """The content of a description, and when a process last mapped the copy, in seconds. Without
    content, as a full disk leaves it, it is of no host."""

    path: Path
    mapped_at: float
    host: str = ""
    source: str = ""
    state: Sequence[int] = ()

    @classmethod
    def read(cls, path: Path) -> "_Description":
        try:
            mapped_at = path.stat().st_mtime
            stated = json.loads(path.read_text())
            return cls(path, mapped_at, stated["host"], stated["path"], stated["state"])
        except FileNotFoundError:  # another process has removed it
            return cls(path, time.time())
        except (OSError, ValueError, KeyError, TypeError):
            return cls(path, mapped_at)

    def is_outdated(self, newest: float) -> bool:
        """`newest`: when a copy of its source was last mapped, or is to be written."""
        unused = time.time() - self.mapped_at > UNUSED_AGE_S
        if self.host != os.uname().nodename:
            return unused
        try:
            changed = _file_state(os.stat(self.source)) != self.state
        except FileNotFoundError:
            return True
        except OSError:
            return False
        return changed or (unused and self.mapped_at < newest)


def _is_removed(copy: Path) -> bool:
    """Removes the copy. False if a process maps it, or this user may not remove it."""
    try:
        return remove_unmapped(copy)
    except OSError:
        return False


def _state(part: FilePart) -> list[int]:
    """As `_file_state`, of the file when it was opened."""
    return list(part.identity[1:])


def _file_state(status: os.stat_result) -> list[int]:
    """What changes when a file is changed or replaced: its inode, size and time of change."""
    return [status.st_ino, status.st_size, status.st_mtime_ns]
