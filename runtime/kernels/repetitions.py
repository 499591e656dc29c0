"""DRY: a penalty for tokens that would continue a repetition of the end of the text, as in
llama.cpp; sequence breakers are single tokens."""

from dataclasses import dataclass

import torch
from torch import Tensor

from runtime.kernels.triton.launch import has_kernels

# Longer repetitions count as this many tokens, because each token costs a comparison.
LONGEST_REPEAT = 256
LARGEST_PENALTY = 1e30


@dataclass(frozen=True, slots=True, eq=False)
class RepeatedRows:
    """The rows of logits to change, with the tables of all slots.

    rows int64 [n], all different; slots, positions int64, of the sequence and the new token of each
    row of logits; history int32 [slots, positions]: tokens; floats float32 [slots, 2]: multiplier,
    base; ints int64 [slots, 3]: allowed length, last n, longest exponent; breakers int32 [slots,
    ceil(vocab / 32)]: bit `token % 32` of word `token // 32` is set for sequence breakers. Rows
    have at most `window` earlier tokens; repetitions beyond `longest` tokens make no difference.
    """

    rows: Tensor
    slots: Tensor
    positions: Tensor
    history: Tensor
    floats: Tensor
    ints: Tensor
    breakers: Tensor
    window: int
    longest: int


def penalise_repetitions(logits: Tensor, repeated: RepeatedRows) -> None:
    """logits float32 [rows, vocab], contiguous, changed in place."""
    if has_kernels(logits.device):
        from runtime.kernels.triton import repetitions

        repetitions.penalise_repetitions(logits, repeated)
    else:
        penalise_repetitions_twin(logits, repeated)


def penalise_repetitions_twin(logits: Tensor, repeated: RepeatedRows) -> None:
    """The specification of `penalise_repetitions`."""
    rows = repeated.rows
    slots, ends = repeated.slots[rows], repeated.positions[rows]
    allowed, last_n, steepest = repeated.ints[slots][:, :, None].unbind(1)
    back = torch.arange(1, repeated.window + 1, device=logits.device)
    places = ends[:, None] - back
    read = (places >= 0) & (back <= last_n)
    known = repeated.history[slots[:, None], places.clamp(min=0)].long()
    breaks = (repeated.breakers[slots].gather(1, known >> 5) >> (known & 31)) & 1 != 0
    # Number of tokens after the last sequence breaker, or of all tokens in the window.
    limit = torch.where(breaks | ~read, back - 1, repeated.window).amin(dim=1, keepdim=True)
    lengths = _repeats(torch.where(read, known, -1), limit, repeated.longest)
    counts = read & (lengths >= allowed) & (limit >= allowed)
    counts &= read.sum(dim=1, keepdim=True) > allowed
    exponents = torch.minimum(lengths - allowed, steepest).double()
    multiplier, base = repeated.floats[slots][:, :, None].double().unbind(1)
    found = multiplier * torch.exp(exponents * torch.log(base))
    penalties = (found.clamp(max=LARGEST_PENALTY) * counts).float()
    # Column k: length of the match that ends k tokens earlier; known[k - 1] continued it.
    penalties = torch.where(breaks[:, :-1], 0.0, penalties[:, 1:])
    most = torch.zeros_like(logits[rows])
    logits[rows] -= most.scatter_reduce_(1, known[:, :-1], penalties, "amax")


def _repeats(tokens: Tensor, limit: Tensor, longest: int) -> Tensor:
    """tokens [rows, n] int64, the newest first, -1 for none -> [rows, n]: column k is the number of
    newest tokens, at most `limit` [rows, 1] and `longest`, that also stand k tokens earlier."""
    count = tokens.shape[1]
    longest = min(longest, count - 1)
    padded = torch.nn.functional.pad(tokens, (0, longest), value=-1)
    lengths = torch.zeros_like(tokens)
    alive = torch.ones_like(tokens, dtype=torch.bool)
    for step in range(longest):
        earlier = padded[:, step : step + count]
        alive &= (tokens[:, step : step + 1] == earlier) & (earlier >= 0) & (limit > step)
        alive[:, 0] = False
        if alive.device.type == "cpu" and not alive.any():
            break
        lengths += alive
    return lengths
