"""Forbidding tokens, drawing them, and the sums that log-probabilities refer to."""

import ctypes
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from runtime.kernels.native import address, library
from runtime.kernels.random_numbers import uniforms
from runtime.kernels.token_order import row_blocks, sorted_tokens, top_tokens
from runtime.kernels.triton.launch import has_kernels

ONE = 2.0**40  # weight of the most likely token; sums of 2**18 such weights fit into int64


class _DrawJob(ctypes.Structure):
    """`caravan_draw_job` in cpu/draws.c."""

    _fields_ = (
        *((name, ctypes.c_void_p) for name in (
            "logits", "slots", "positions", "floats", "ints", "history", "tokens", "finite",
        )),
        ("history_stride", ctypes.c_int64),
        *((name, ctypes.c_int32) for name in ("rows", "vocab")),
    )  # fmt: skip


@dataclass(frozen=True, slots=True)
class DrawnRows:
    """The rows to draw tokens for, with the tables of all slots.

    logits float32 [rows, vocab]; slots, positions int64 [rows]; floats float32 [slots, 6] and ints
    int64 [slots, 5] as in `Sampler`; history int32 [slots, positions], to which the tokens are
    written.
    """

    logits: Tensor
    slots: Tensor
    positions: Tensor
    floats: Tensor
    ints: Tensor
    history: Tensor

    def part(self, begin: int, end: int | None = None) -> "DrawnRows":
        """Rows [begin, end)."""
        if begin == 0 and end == len(self.logits):
            return self
        rows = slice(begin, end)
        return replace(
            self, logits=self.logits[rows], slots=self.slots[rows], positions=self.positions[rows]
        )

    def write(self, peak: Tensor, tokens: Tensor) -> tuple[Tensor, Tensor]:
        """Write tokens int64 [rows] to `history`; returns them, and whether `peak` [rows] is
        finite."""
        self.history[self.slots, self.positions] = tokens.int()
        return tokens, torch.isfinite(peak)


def draw_top(rows: DrawnRows, *, greedy: int, width: int) -> tuple[Tensor, Tensor]:
    """Draw a token for each row: the most likely one for the first `greedy` rows, whose top_k in
    `ints` is 1, and one of the top_k, at most 256, for the others.

    width: the largest top_k of a row. -> tokens int64 [rows]; bool [rows]: whether the row's
    largest logit is finite.
    """
    logits, floats, ints, history = rows.logits, rows.floats, rows.ints, rows.history
    if has_kernels(logits.device):
        from runtime.kernels.triton import draws

        return draws.draw_top(rows, greedy=greedy, width=width)
    kernels = library() if logits.device.type == "cpu" else None
    if kernels is None:
        return draw_top_twin(rows, greedy=greedy, width=width)
    count, vocab = logits.shape
    tokens, finite = torch.empty(count, dtype=torch.int64), torch.empty(count, dtype=torch.bool)
    job = _DrawJob(
        address(logits, (count, vocab)), address(rows.slots, (count,), torch.int64),
        address(rows.positions, (count,), torch.int64), address(floats, floats.shape),
        address(ints, ints.shape, torch.int64), address(history, history.shape, torch.int32),
        tokens.data_ptr(), finite.data_ptr(), history.stride(0), count, vocab,
    )  # fmt: skip
    kernels.caravan_draw(ctypes.byref(job), torch.get_num_threads())
    return tokens, finite


def draw_top_twin(rows: DrawnRows, *, greedy: int, width: int) -> tuple[Tensor, Tensor]:
    """The specification of `draw_top`."""
    peak, token = rows.logits[:greedy].max(dim=1)  # NaN is the largest; the first of equal ones
    if greedy < len(rows.logits):
        others = rows.part(greedy)
        values, ids = top_tokens(others.logits, width)
        drawn = ids.gather(1, _pick_ordered(values, _Parameters.of(others)))
        peak, token = torch.cat([peak, values[:, 0]]), torch.cat([token, drawn[:, 0]])
    return rows.write(peak, token)


def draw_all(rows: DrawnRows, *, ordered: int) -> tuple[Tensor, Tensor]:
    """Draw a token for each row from the whole vocabulary: by top_k, top_p and min_p, in the order
    of logits, for the first `ordered` rows; by min_p, in the order of tokens, for the others.

    Returns the same as `draw_top`.
    """
    if has_kernels(rows.logits.device):
        from runtime.kernels.triton import thresholds

        return thresholds.draw_all(rows, ordered=ordered)
    return draw_all_twin(rows, ordered=ordered)


def draw_all_twin(rows: DrawnRows, *, ordered: int) -> tuple[Tensor, Tensor]:
    """The specification of `draw_all`."""
    peaks, tokens = [], []
    for begin, end in (*row_blocks(0, ordered), *row_blocks(ordered, len(rows.logits))):
        block = rows.part(begin, end)
        values, parameters = block.logits, _Parameters.of(block)
        if begin < ordered:
            values, ids = sorted_tokens(values)
            peaks.append(values[:, 0])
            tokens.append(ids.gather(1, _pick_ordered(values, parameters))[:, 0])
        else:
            peaks.append(values.amax(dim=1))
            tokens.append(_pick_unordered(values, peaks[-1], parameters)[:, 0])
    return rows.write(torch.cat(peaks), torch.cat(tokens))


def log_sums(logits: Tensor) -> Tensor:
    """logits float32 [rows, vocab] -> [rows, 1]: the logarithm of the sum of e^logit.

    The bits of a row do not depend on other rows; torch divides sums by the number of rows on CUDA
    devices.
    """
    if has_kernels(logits.device):
        from runtime.kernels.triton.log_sums import log_sums as launched

        return launched(logits)
    return logits.logsumexp(dim=1, keepdim=True)


@dataclass(frozen=True, slots=True)
class _Parameters:
    """Sampling parameters of rows, [rows, 1] each, and their random numbers [rows]."""

    temperature: Tensor
    top_p: Tensor
    min_p: Tensor
    top_k: Tensor
    noise: Tensor

    @classmethod
    def of(cls, rows: DrawnRows) -> "_Parameters":
        floats, ints = rows.floats[rows.slots], rows.ints[rows.slots]
        noise = uniforms(ints[:, 0], rows.positions + ints[:, 4])
        return cls(floats[:, 0:1], floats[:, 1:2], floats[:, 2:3], ints[:, 1:2], noise)


def _pick_ordered(values: Tensor, rows: _Parameters) -> Tensor:
    """The column [rows, 1] that each row draws from its descending values [rows, n].

    Each filter keeps a prefix of the row, so one cumulative sum serves all filters.
    """
    odds = torch.exp((values - values[:, :1]) / rows.temperature)
    ranks = torch.arange(values.shape[1], device=values.device)
    weights = (odds * ONE).long() * (ranks < rows.top_k)
    sums = weights.cumsum(dim=1)
    limit = (sums[:, -1:].double() * rows.top_p.double()).long()
    kept = (sums - weights <= limit) & (odds >= rows.min_p)
    return drawn_column(sums, (sums * kept).amax(dim=1), rows.noise)


def _pick_unordered(values: Tensor, peak: Tensor, rows: _Parameters) -> Tensor:
    """The column [rows, 1] that each row draws from its values [rows, vocab], with peak [rows]."""
    odds = torch.exp((values - peak[:, None]) / rows.temperature)
    sums = ((odds * ONE).long() * (odds >= rows.min_p)).cumsum(dim=1)
    return drawn_column(sums, sums[:, -1], rows.noise)


def drawn_column(sums: Tensor, total: Tensor, noise: Tensor) -> Tensor:
    """The first column [rows, 1] where the cumulative sums int64 [rows, n] exceed noise * total,
    [rows] each."""
    target = torch.minimum((noise * total.double()).long(), total - 1)
    column = torch.searchsorted(sums, target[:, None], right=True)
    return column.clamp_(max=sums.shape[1] - 1)  # rows that are not finite stay in range


def forbid(logits: Tensor, rows: Tensor, words: Tensor, count: int) -> None:
    """Set the logits of forbidden tokens to minus infinity, in place, in the first `count` of
    `rows` [n] int64, which are distinct.

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
    """The specification of `forbid`."""
    powers = 2 ** torch.arange(8, dtype=torch.uint8, device=logits.device)
    rows, octets = rows[:count], words[:count].view(torch.uint8)  # little-endian
    forbidden = ((octets[:, :, None] & powers) == 0).flatten(1)[:, : logits.shape[1]]
    logits[rows] = logits[rows].masked_fill_(forbidden, -torch.inf)
