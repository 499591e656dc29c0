"""Forbidding tokens, and drawing them, for which the sampler's torch code is the twin."""

import ctypes

import torch
from torch import Tensor

from runtime.kernels.native import address, library
from runtime.kernels.triton.launch import has_kernels


class _DrawJob(ctypes.Structure):
    """`caravan_draw_job` in cpu/draws.c."""

    _fields_ = (
        *((name, ctypes.c_void_p) for name in (
            "logits", "slots", "positions", "floats", "ints", "history", "tokens", "finite",
        )),
        ("history_stride", ctypes.c_int64),
        *((name, ctypes.c_int32) for name in ("rows", "greedy", "vocab")),
    )  # fmt: skip


def draw_top(
    logits: Tensor,
    slots: Tensor,
    positions: Tensor,
    floats: Tensor,
    ints: Tensor,
    history: Tensor,
    *,
    greedy: int,
    width: int,
) -> tuple[Tensor, Tensor] | None:
    """Draw a token for each row: the most likely one for the first `greedy` rows, one of the top_k,
    at most 256, for the others.

    logits float32 [rows, vocab]; slots, positions int64 [rows]; floats float32 [slots, 6] and ints
    int64 [slots, 5] as in `Sampler`; history int32 [slots, positions], to which the tokens are
    written. width: the largest top_k of a row. -> tokens int64 [rows], finite bool [rows]; None
    without kernels.
    """
    if has_kernels(logits.device):
        from runtime.kernels.triton import draws

        return draws.draw_top(
            logits, slots, positions, floats, ints, history, greedy=greedy, width=width
        )
    kernels = library() if logits.device.type == "cpu" else None
    if kernels is None:
        return None
    rows, vocab = logits.shape
    tokens, finite = torch.empty(rows, dtype=torch.int64), torch.empty(rows, dtype=torch.bool)
    job = _DrawJob(
        address(logits, (rows, vocab)), address(slots, (rows,), torch.int64),
        address(positions, (rows,), torch.int64), address(floats, floats.shape),
        address(ints, ints.shape, torch.int64), address(history, history.shape, torch.int32),
        tokens.data_ptr(), finite.data_ptr(), history.stride(0), rows, greedy, vocab,
    )  # fmt: skip
    kernels.caravan_draw(ctypes.byref(job), torch.get_num_threads())
    return tokens, finite


def forbid(logits: Tensor, rows: Tensor, words: Tensor, count: int) -> None:
    """Sets logits to minus infinity, in place, of the first `count` rows [n] int64, all different.

    logits float32 [rows, vocab]; words int32 [n, ceil(vocab / 32)]: bit `token % 32` of word
    `token // 32` is set for each token that the row may draw. Raises IndexError for rows outside
    the logits.
    """
    kernels = library() if logits.device.type == "cpu" else None
    if kernels is None:
        forbid_twin(logits, rows, words, count)
        return
    total, vocab = logits.shape
    assert count <= len(rows)
    if kernels.caravan_forbid(
        address(logits, (total, vocab)), total, vocab, address(rows, (len(rows),), torch.int64),
        count, address(words, (len(rows), -(-vocab // 32)), torch.int32), torch.get_num_threads(),
    ):  # fmt: skip
        raise IndexError(f"rows outside the {total} rows of logits")


def forbid_twin(logits: Tensor, rows: Tensor, words: Tensor, count: int) -> None:
    """The same with torch."""
    powers = 2 ** torch.arange(8, dtype=torch.uint8, device=logits.device)
    rows, octets = rows[:count], words[:count].view(torch.uint8)  # little-endian
    forbidden = ((octets[:, :, None] & powers) == 0).flatten(1)[:, : logits.shape[1]]
    logits[rows] = logits[rows].masked_fill_(forbidden, -torch.inf)
