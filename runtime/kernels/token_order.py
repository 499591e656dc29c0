"""Tokens in the order of their logits, equal ones by id, the same for any number of rows."""

import numpy as np
import torch
from torch import Tensor

CHUNK = 64
SORT_BLOCK = 8  # rows sorted at once, which bounds the memory for it


def top_tokens(logits: Tensor, count: int) -> tuple[Tensor, Tensor]:
    """The `count` largest of each row, larger first, the smaller id first among equals.

    logits [rows, vocab] -> values [rows, count], ids [rows, count]. Only the `count` chunks with
    the largest maxima can contain them: each of these has at least one element that ranks above
    all elements of the other chunks.
    """
    rows, vocab = logits.shape
    count = min(count, vocab)
    if vocab % CHUNK:
        logits = torch.nn.functional.pad(logits, (0, -vocab % CHUNK), value=-torch.inf)
    chunked = logits.view(rows, logits.shape[1] // CHUNK, CHUNK)
    peaks = chunked.amax(dim=2)
    numbers = torch.arange(peaks.shape[1], device=logits.device)
    best = _rank(peaks, numbers).topk(min(count, peaks.shape[1]), dim=1).indices
    candidates = chunked.gather(1, best[:, :, None].expand(-1, -1, CHUNK)).flatten(1)
    inside = torch.arange(CHUNK, device=logits.device)
    ids = (best[:, :, None] * CHUNK + inside).flatten(1)
    top = _rank(candidates, ids).topk(count, dim=1).indices
    return candidates.gather(1, top), ids.gather(1, top)


def sorted_tokens(logits: Tensor) -> tuple[Tensor, Tensor]:
    """All of each row, larger first, the smaller id first among equals."""
    ids = torch.arange(logits.shape[1], device=logits.device)
    keys = ascending(-_rank(logits, ids))
    ids = 0xFFFFFFFF - (-keys & 0xFFFFFFFF)
    return logits.gather(1, ids), ids


def row_blocks(begin: int, end: int) -> list[tuple[int, int]]:
    """Rows [begin, end) in parts of at most SORT_BLOCK."""
    return [(at, min(at + SORT_BLOCK, end)) for at in range(begin, end, SORT_BLOCK)]


def ascending(keys: Tensor) -> Tensor:
    """Each row of int64 sorted; on a CPU numpy's vectorised sort is 30 times as fast as torch's."""
    if keys.device.type == "cpu":
        return torch.from_numpy(np.sort(keys.numpy(), axis=1))
    return keys.sort(dim=1).values


def _rank(values: Tensor, ids: Tensor) -> Tensor:
    """Integers in the order of (value, smaller id first), NaN above all; float32, ids < 2**32."""
    bits = (values + 0.0).view(torch.int32).long()  # + 0.0: minus zero equals zero
    ordered = torch.where(bits < 0, bits ^ 0x7FFFFFFF, bits)
    ordered = ordered.masked_fill(values.isnan(), 0x7FFFFFFF)
    return (ordered << 32) + (0xFFFFFFFF - ids)
