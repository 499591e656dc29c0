"""Copies of pages between a device and host memory, in batches."""

from collections.abc import Iterable, Iterator, Sequence
from itertools import accumulate, pairwise

import torch
from torch import Tensor

from runtime.kv.page_group import CopyKind, PageCopy
from runtime.worker.model import LayerPages
from runtime.worker.pinned_buffer import ALIGNMENT

# Pages of a batch are gathered in at most as much of the device's memory.
_MOST_STAGED_BYTES = 64 << 20
_ELEMENTS = (torch.int64, torch.int32, torch.int16, torch.uint8)


class HostTier:
    """The host's copies of pages of all cache groups, in one allocation, pinned for CUDA.

    `layers`: of each group; `pages`: number of host pages of each group; `workspace_bytes`: see
    `HostCopies`. The constructor allocates and writes all memory.
    """

    def __init__(
        self,
        layers: Sequence[Sequence[LayerPages]],
        pages: Sequence[int],
        *,
        workspace_bytes: int,
    ) -> None:
        self._copies = [_by_device(group, workspace_bytes) for group in layers]
        parts = [part for group in self._copies for part in group]
        sizes = [
            count * part.page_bytes
            for count, group in zip(pages, self._copies, strict=True)
            for part in group
        ]
        aligned = [-(-size // ALIGNMENT) * ALIGNMENT for size in sizes]
        pinned = any(part.device.type == "cuda" for part in parts)
        whole = torch.empty(sum(aligned), dtype=torch.uint8, pin_memory=pinned)
        if not pinned:
            whole.zero_()  # makes the system allocate the memory now
        for part, piece, used in zip(parts, whole.split(aligned), sizes, strict=True):
            part.use(piece[:used])

    def copy(self, batch: Sequence[PageCopy]) -> None:
        """Enqueue a batch of `batches`; does not synchronise."""
        for part in self._copies[batch[0].group]:
            part.copy(batch)


def _by_device(layers: Iterable[LayerPages], workspace_bytes: int) -> list["HostCopies"]:
    parts: dict[torch.device, list[Tensor]] = {}
    for layer in layers:
        parts.setdefault(layer.keys.device, []).extend(layer.stored)
    return [HostCopies(each, workspace_bytes=workspace_bytes) for each in parts.values()]


class HostCopies:
    """The host's copies of pages of one cache group, in the layers on one device.

    A host page has the pages of all layers one after the other, so each is copied between the
    memories at once. `parts`: the layers' keys and values [pages, ...]. On the device, the pages of
    a batch are gathered or scattered by one operation per part, in at most `workspace_bytes`, or in
    one page, which are free again for the next operations.
    """

    def __init__(self, parts: Iterable[Tensor], *, workspace_bytes: int) -> None:
        by_page = [part.flatten(1) for part in parts if part.numel()]
        sizes = [part.shape[1] * part.itemsize for part in by_page]
        dtype = next(t for t in _ELEMENTS if all(size % t.itemsize == 0 for size in sizes))
        self._parts = [part.view(dtype) for part in by_page]
        self._columns = list(pairwise(accumulate((p.shape[1] for p in self._parts), initial=0)))
        self.page_bytes = sum(sizes)
        staged_bytes = min(workspace_bytes, _MOST_STAGED_BYTES)
        self._batch_pages = max(1, staged_bytes // (self.page_bytes + max(sizes)))
        self._host = self._parts[0].new_empty((0, self._columns[-1][1]), device="cpu")

    @property
    def device(self) -> torch.device:
        return self._parts[0].device

    def use(self, memory: Tensor) -> None:
        """Keep the host's pages in `memory`, uint8 [pages * page_bytes]."""
        self._host = memory.view(self._host.dtype).view(-1, self._host.shape[1])

    def copy(self, copies: Sequence[PageCopy]) -> None:
        """Enqueue copies of one kind. Copies to the host run in their order; those of other kinds
        must have different targets. Does not synchronise."""
        copy = self._store if copies[0].kind is CopyKind.TO_HOST else self._restore
        for first in range(0, len(copies), self._batch_pages):
            copy(copies[first : first + self._batch_pages])

    def _store(self, copies: Sequence[PageCopy]) -> None:
        staged, pages = self._staged(copies), self._indices([copy.source for copy in copies])
        for part, (begin, end) in zip(self._parts, self._columns, strict=True):
            staged[:, begin:end] = part.index_select(0, pages)
        for row, copy in zip(staged, copies, strict=True):
            self._host[copy.target].copy_(row, non_blocking=True)

    def _restore(self, copies: Sequence[PageCopy]) -> None:
        staged, pages = self._staged(copies), self._indices([copy.target for copy in copies])
        for row, copy in zip(staged, copies, strict=True):
            row.copy_(self._host[copy.source], non_blocking=True)
        for part, (begin, end) in zip(self._parts, self._columns, strict=True):
            part.index_copy_(0, pages, staged[:, begin:end])

    def _staged(self, copies: Sequence[PageCopy]) -> Tensor:
        return self._parts[0].new_empty(len(copies), self._host.shape[1])

    def _indices(self, pages: Sequence[int]) -> Tensor:
        pinned = self.device.type == "cuda"
        numbers = torch.empty(len(pages), dtype=torch.int64, pin_memory=pinned)
        return numbers.copy_(torch.tensor(pages)).to(self.device, non_blocking=True)


def batches(copies: Iterable[PageCopy]) -> Iterator[list[PageCopy]]:
    """Copies of one group and kind that can be made together; batch after batch, they have the
    effect of the copies one after the other. A copy on the device is a batch of its own.

    Restored pages evict others, so copies to the host and from it alternate; those to the host come
    first, up to a copy that depends on an earlier one from it.
    """
    gathered = _Gathered()
    for copy in copies:
        if gathered.precedes(copy):
            yield from gathered.batches()
            gathered = _Gathered()
        if copy.kind is CopyKind.ON_DEVICE:
            yield [copy]
        else:
            gathered.add(copy)
    yield from gathered.batches()


class _Gathered:
    """Copies between device and host in any order that has those to the host first."""

    def __init__(self) -> None:
        self._by_kind: dict[tuple[CopyKind, int], list[PageCopy]] = {}
        self._restored: set[tuple[int, int]] = set()  # device pages that are written
        self._sources: set[tuple[int, int]] = set()  # host pages that are read

    def precedes(self, copy: PageCopy) -> bool:
        """Whether these must be made before `copy`."""
        source, target = (copy.group, copy.source), (copy.group, copy.target)
        if copy.kind is CopyKind.TO_HOST:
            return source in self._restored or target in self._sources
        return copy.kind is CopyKind.ON_DEVICE or target in self._restored

    def add(self, copy: PageCopy) -> None:
        self._by_kind.setdefault((copy.kind, copy.group), []).append(copy)
        if copy.kind is CopyKind.FROM_HOST:
            self._restored.add((copy.group, copy.target))
            self._sources.add((copy.group, copy.source))

    def batches(self) -> Iterator[list[PageCopy]]:
        return (self._by_kind[each] for each in sorted(self._by_kind))  # TO_HOST < FROM_HOST
