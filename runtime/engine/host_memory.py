"""The second tier of the prefix cache in host memory: its size, and the speed of its copies."""

import time
from collections.abc import Sequence

import torch

from runtime.engine.memory_plan import available_bytes
from runtime.kv.cache_layout import CacheLayout
from runtime.kv.cache_types import CacheType
from runtime.kv.host_store import HostPages, TransferCosts
from runtime.kv.page_group import CopyKind, PageCopy
from runtime.kv.pool import PagePool, page_bytes

# By default on CUDA devices; in total for the ranks on a machine, if it has that to spare.
MOST_BYTES, SHARE = 4 << 30, 16
_COPIES = 64  # of pages, to measure their speed


def host_page_counts(
    layout: CacheLayout,
    pages: Sequence[int],
    type: CacheType,
    *,
    device: torch.device,
    budget_bytes: int | None,
    machine_ranks: int,
) -> tuple[int, ...]:
    """Number of host pages of each cache group: as many as fit in `budget_bytes`, in proportion to
    the device's `pages`. `budget_bytes` None: some GiB for a CUDA device; nothing for a CPU, whose
    memory is the host's."""
    if budget_bytes is None:
        free = available_bytes(torch.device("cpu")) if device.type == "cuda" else 0
        budget_bytes = min(MOST_BYTES, free // SHARE) // machine_ranks
    if device.type == "cuda":  # torch rounds the size of pinned memory up to powers of two
        budget_bytes = 1 << budget_bytes.bit_length() >> 1
    sizes = [page_bytes(layout, group, type) for group in range(len(pages))]
    whole = sum(count * size for count, size in zip(pages, sizes, strict=True))
    return tuple(count * budget_bytes // whole for count in pages) if whole else (0,) * len(pages)


def measured_host_pages(
    layout: CacheLayout,
    counts: Sequence[int],
    type: CacheType,
    *,
    pool: PagePool,
    device: torch.device,
) -> HostPages:
    """Allocates `counts` host pages of each group and measures how long copies of pages take. Waits
    for the device; call before the first step."""
    sizes = [page_bytes(layout, group, type) for group in range(len(counts))]
    group = max(range(len(counts)), key=lambda number: counts[number] > 0 and sizes[number])
    held = len(pool.layer(layout.groups[group].layers[0]).keys)
    some = range(min(_COPIES // 2, counts[group], held))
    copies = [
        PageCopy(group, page, page, kind)
        for kind in (CopyKind.TO_HOST, CopyKind.FROM_HOST)
        for page in some
    ]
    pool.copy_pages(copies)
    _finish(device)
    begin = time.perf_counter()
    pool.copy_pages(copies)
    _finish(device)
    seconds = time.perf_counter() - begin
    return HostPages(counts, sizes, TransferCosts(len(copies) * sizes[group] / seconds))


def _finish(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
