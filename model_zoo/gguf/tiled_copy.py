"""Copies of the weights of model files in tiles, written once per node and mapped by all processes.

A copy has the tiles of a tensor at the place where the file has its rows, and holes elsewhere,
which take no space on a disk. A copy that has its final name is complete and never changes. Its
name follows from the file's device, inode, size and time of the last change, so a file that was
changed or replaced gets another one.
"""

import fcntl
import hashlib
import json
import logging
import mmap
import os
import shutil
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, replace
from itertools import chain
from math import prod
from pathlib import Path

import torch

from model_zoo.gguf.header import TensorInfo
from model_zoo.gguf.mapped import WORD_BYTES, MappedBytes, MappedTensors
from model_zoo.gguf.model_headers import FilePart
from model_zoo.gguf.reader import GGUFFile
from runtime.quant.block_types import TILE_ROWS
from runtime.quant.formats.row_tiles import to_tiles
from runtime.quant.weight import TILED_TYPES

_log = logging.getLogger(__name__)

# Smaller models fit into the caches of processors and gain nothing.
LEAST_BYTES = 64 << 20
# Of the disk, left free for others.
SPARE_BYTES = 1 << 30
_FORMAT = 1
# Bytes of rows that a thread rearranges at once.
_SLAB_BYTES = 4 << 20
_LOCK, _COPY, _UNFINISHED, _SOURCE = "lock", ".tiles", ".unfinished", ".json"
# Matrices whose rows are looked up and never multiplied.
_LOOKED_UP = frozenset(
    f"{name}.weight" for name in ("per_layer_token_embd", "position_embd", "token_types")
)
_EMBEDDING, _HEAD = "token_embd.weight", "output.weight"

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
    written: Written = lambda name, nbytes: None,
) -> MappedTensors | None:
    """The tensors of the file that have tiles, as views of mapped copies; None if there are few or
    a copy cannot be written, which is logged.

    written(name, nbytes): called for each part of a tensor that was copied. While another process
    writes a copy into the directory, this one waits.
    """
    infos = {info.name: info for info in _suitable(file)}
    if sum(info.nbytes for info in infos.values()) < max(1, options.least_bytes):
        return None
    copies = [
        _Copy(part, [infos[name] for name in part.header.tensors if name in infos], options)
        for part in file.parts
    ]
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
    by_name: dict[str, MappedBytes] = {}
    for copy, mapped in zip(copies, maps, strict=True):
        if mapped is None:
            return None
        by_name |= dict.fromkeys((info.name for info in copy.infos), mapped)
    nbytes = sum(copy.nbytes for copy in copies)
    _log.info("Mapped %s bytes of weights in tiles from %s.", f"{nbytes:,}", options.directory)
    return MappedTensors({name: _tiled(info) for name, info in infos.items()}, by_name)


def _suitable(file: GGUFFile) -> Iterator[TensorInfo]:
    """The matrices that are copied, as they are in the file."""
    looked_up = _LOOKED_UP | {_EMBEDDING} if _HEAD in file.tensors else _LOOKED_UP
    for info in file.tensors.values():
        is_matrix = len(info.shape) in (2, 3) and info.shape[-2] % TILE_ROWS == 0 and info.nbytes
        has_tiles = info.type.name in TILED_TYPES and info.begin % WORD_BYTES == 0
        if is_matrix and has_tiles and info.name not in looked_up:
            yield info


def _tiled(info: TensorInfo) -> TensorInfo:
    return replace(info, type=TILED_TYPES[info.type.name])


class _Copy:
    """The copy of one file of a model; `infos`: its tensors, as they are in the file."""

    def __init__(self, part: FilePart, infos: Sequence[TensorInfo], options: TilingOptions) -> None:
        self.part, self.infos = part, infos
        self.nbytes = sum(info.nbytes for info in infos)
        self._end = max((info.begin + info.nbytes for info in infos), default=0)
        stated = json.dumps([_FORMAT, *part.identity]).encode()
        stem = options.directory / hashlib.sha256(stated).hexdigest()[:32]
        self._path, self._source = stem.with_suffix(_COPY), stem.with_suffix(_SOURCE)
        self._unfinished = stem.with_suffix(_UNFINISHED)

    def opened(self) -> MappedBytes | None:
        """The mapped copy; None if there is none."""
        try:
            with self._path.open("rb") as file:
                data = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
        except (OSError, ValueError):  # ValueError: an empty file
            return None
        return MappedBytes(self._path, data) if len(data) == self._end else None

    def write(self, written: Written) -> None:
        """Raises OSError if the source has changed or the disk is full; then nothing is left."""
        try:
            with self.part.path.open("rb") as source, self._unfinished.open("wb") as target:
                self._check(os.fstat(source.fileno()))
                self._fill(source.fileno(), target.fileno(), written)
                os.truncate(target.fileno(), self._end)
                os.fsync(target.fileno())  # the name must not outlive the content
            _describe(self._source, self.part)
            self._unfinished.replace(self._path)
        finally:
            self._unfinished.unlink(missing_ok=True)

    def _check(self, status: os.stat_result) -> None:
        if _identity(status) != self.part.identity:
            raise OSError(0, f"{self.part.path} has changed")

    def _fill(self, source: int, target: int, written: Written) -> None:
        def copied(slab: "_Slab") -> "_Slab":
            slab.copy(source, target)
            return slab

        with ThreadPoolExecutor(torch.get_num_threads(), "tiles") as threads:
            for slab in threads.map(copied, chain.from_iterable(map(_slabs, self.infos))):
                written(slab.info.name, slab.nbytes)


@dataclass(frozen=True, slots=True)
class _Slab:
    """Rows of a tensor that are rearranged at once: `nbytes` from byte `begin` of the file."""

    info: TensorInfo
    begin: int
    nbytes: int

    def copy(self, source: int, target: int) -> None:
        """From one file descriptor to the other; OSError if the source ends before."""
        data = bytearray(self.nbytes)
        if os.preadv(source, [data], self.begin) < self.nbytes:
            raise OSError(0, f"the file ends within {self.info.name}")
        row_bytes = self.info.type.row_bytes(self.info.shape[-1])
        rows = torch.frombuffer(data, dtype=torch.uint8).view(-1, row_bytes)
        tiles = to_tiles(rows, self.info.type.name, self.info.type.block_bytes)
        left, at = tiles.numpy().data.cast("B"), self.begin
        while left:  # a disk that becomes full first writes a part
            done = os.pwrite(target, left, at)
            left, at = left[done:], at + done


def _slabs(info: TensorInfo) -> Iterator[_Slab]:
    """The rows of all matrices of a tensor, which are whole tiles."""
    tile_bytes = TILE_ROWS * info.type.row_bytes(info.shape[-1])
    size, end = max(1, _SLAB_BYTES // tile_bytes) * tile_bytes, info.begin + info.nbytes
    assert info.nbytes == prod(info.shape[:-1]) // TILE_ROWS * tile_bytes, info.name
    for begin in range(info.begin, end, size):
        yield _Slab(info, begin, min(size, end - begin))


def _write_missing(copies: Sequence[_Copy], options: TilingOptions, written: Written) -> None:
    """Writes copies that no other process has written while this one waited for the lock."""
    missing = [copy for copy in copies if copy.opened() is None]
    if not missing:
        return
    _remove_outdated(options.directory)
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


def _describe(path: Path, part: FilePart) -> None:
    """Names the source of a copy, by which `_remove_outdated` finds that it is outdated."""
    stated = {"path": str(part.path.resolve()), "identity": part.identity}
    path.write_text(json.dumps(stated))


def _remove_outdated(directory: Path) -> None:
    """Removes the copies whose source has changed or is gone, and what killed writers left."""
    for description in directory.glob(f"*{_SOURCE}"):
        stem = description.with_suffix("")
        if _is_outdated(description):
            stem.with_suffix(_COPY).unlink(missing_ok=True)
            description.unlink()
            _log.info("Removed the rearranged weights of a file that has changed or is gone.")
    for unfinished in directory.glob(f"*{_UNFINISHED}"):
        unfinished.unlink()


def _is_outdated(description: Path) -> bool:
    try:
        stated: Mapping[str, object] = json.loads(description.read_text())
        status = os.stat(str(stated["path"]))
    except FileNotFoundError:
        return True
    except (OSError, ValueError, KeyError, TypeError):
        return False
    return list(_identity(status)) != stated.get("identity")


def _identity(status: os.stat_result) -> tuple[int, int, int, int]:
    """As `FilePart.identity`."""
    return status.st_dev, status.st_ino, status.st_size, status.st_mtime_ns
