"""Drawing tokens on a CPU; the sampler's torch code is the twin."""

import ctypes

import torch
from torch import Tensor

from runtime.kernels.native import address, library


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
) -> tuple[Tensor, Tensor] | None:
    """Draw a token for each row: the most likely one for the first `greedy` rows, one of the top_k,
    at most 256, for the others.

    logits float32 [rows, vocab]; slots, positions int64 [rows]; floats float32 [slots, 6] and ints
    int64 [slots, 4] as in `Sampler`; history int32 [slots, positions], to which the tokens are
    written. -> tokens int64 [rows], finite bool [rows]; None without native kernels.
    """
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
