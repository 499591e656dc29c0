"""The gated delta rule over sequence states, and the short convolution of recurrent layers."""

import ctypes
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from runtime.kernels.attention import TWIN_ELEMENTS
from runtime.kernels.native import address, library
from runtime.kernels.pointwise import add_, contiguous, silu
from runtime.kernels.sequence_states import CHUNK, Decays, States, StepSpans, groups_of_spans
from runtime.kernels.triton.launch import has_kernels
from runtime.worker.model import AttentionPlan, LayerPages

# The epsilon of the norms of queries and keys.
NORM_EPS = 1e-6


@dataclass(frozen=True, slots=True, eq=False)
class DeltaGates:
    """The gates of the heads: a state decays by e^(rate * softplus(alpha + offset)), and a row
    updates it with strength sigmoid(beta).

    betas [tokens, heads]; rates float32 [heads], negative; alphas [tokens, heads * decays], offsets
    float32 [heads * decays]: a head has one decay, or one for each element of its keys (Kimi Team,
    "Kimi Linear", section 3.1).
    """

    alphas: Tensor
    betas: Tensor
    rates: Tensor
    offsets: Tensor

    @property
    def decays(self) -> int:
        """The number of decays of a head."""
        return self.offsets.numel() // self.rates.numel()


def short_convolution(
    x: Tensor,
    weight: Tensor,
    pages: LayerPages,
    plan: AttentionPlan,
    *,
    bias: Tensor | None = None,
    curved: bool = True,
) -> Tensor:
    """Each channel's sum over this row and the `taps` before it or, if `curved`, silu of the sum;
    in x's type.

    x [tokens, channels], weight float32 [taps + 1, channels], the factors of the row itself last;
    bias float32 [channels].
    Inputs before the first row of a sequence are zero. pages.keys [pages, taps, channels] has the
    last inputs of earlier steps and is overwritten with the last ones of this step.
    """
    if x.device.type != "cpu" or (kernels := library()) is None:
        if has_kernels(x.device):
            from runtime.kernels.triton import delta

            return delta.short_convolution(x, weight, pages, plan, bias=bias, curved=curved)
        summed = short_convolution_twin(x, weight, pages, plan, bias=bias)
        return silu(summed) if curved else summed
    wide, spans, states = contiguous(x.float()), StepSpans.of(plan, len(x)), pages.keys
    count, channels = states.shape[0], x.shape[1]
    taps = weight.shape[0] - 1
    result = torch.empty_like(wide)
    kernels.caravan_short_convolution(
        address(wide, x.shape), address(weight, (taps + 1, channels)), *spans.addresses,
        spans.count, channels, taps, address(states, (count, taps, channels)),
        result.data_ptr(), torch.get_num_threads(),
    )  # fmt: skip
    if bias is not None:
        add_(result, bias)
    return (silu(result) if curved else result).to(x.dtype)


def gated_delta(
    mixed: Tensor,
    gates: DeltaGates,
    pages: LayerPages,
    plan: AttentionPlan,
    *,
    key_heads: int,
    tiled: bool,
) -> Tensor:
    """Yang, Kautz and Hatamizadeh, "Gated Delta Networks" -> [tokens, heads, value_dim].

    Each head has a state S [key_dim, value_dim]. A row with query q, key k and value v updates it
    to S' = e^g S + sigmoid(beta) k (v - (e^g S)^T k)^T, and its result is S'^T q. Queries and keys
    are normalised to length 1 first, then queries are divided by sqrt(key_dim).

    mixed [tokens, 2 * key_heads * key_dim + heads * value_dim]: queries, keys, values. Value head h
    uses key head h % key_heads if `tiled`, else h // (heads / key_heads). States are zero at
    position 0; pages.values [pages, heads, key_dim, value_dim] has those of earlier steps and is
    overwritten. Computed in float32; the result is in mixed's type. With C and Triton kernels, the
    bits of a row depend neither on other sequences nor on how its own is divided into steps.
    """
    if mixed.device.type != "cpu" or (kernels := library()) is None:
        if has_kernels(mixed.device):
            from runtime.kernels.triton import delta

            return delta.gated_delta(mixed, gates, pages, plan, key_heads=key_heads, tiled=tiled)
        return gated_delta_twin(mixed, gates, pages, plan, key_heads=key_heads, tiled=tiled)
    states, spans, rows = pages.values, StepSpans.of(plan, len(mixed)), len(mixed)
    _, heads, key_dim, value_dim = states.shape
    if heads % key_heads:
        raise ValueError(f"{heads} value heads cannot share {key_heads} heads of keys")
    width = 2 * key_heads * key_dim + heads * value_dim
    if gates.decays not in (1, key_dim):
        raise ValueError(f"{gates.decays} decays for keys of {key_dim} elements")
    inner = heads * gates.decays
    wide, alphas, betas = (contiguous(t.float()) for t in (mixed, gates.alphas, gates.betas))
    result = torch.empty(rows, heads, value_dim)
    job = _DeltaJob(
        address(wide, (rows, width)), address(alphas, (rows, inner)), address(betas, (rows, heads)),
        address(gates.rates, (heads,)), address(gates.offsets, (inner,)), *spans.addresses,
        address(states, states.shape), result.data_ptr(), spans.count, heads, key_heads,
        key_dim, value_dim, gates.decays, tiled,
    )  # fmt: skip
    kernels.caravan_delta(ctypes.byref(job), torch.get_num_threads())
    return result.to(mixed.dtype)


def short_convolution_twin(
    x: Tensor,
    weight: Tensor,
    pages: LayerPages,
    plan: AttentionPlan,
    *,
    bias: Tensor | None = None,
) -> Tensor:
    """The specification of `short_convolution`, before silu."""
    result = torch.empty_like(x)
    taps = weight.shape[0] - 1
    for spans, rows in groups_of_spans(plan.spans, x.device):
        states = States(pages.keys, plan, rows)
        inputs = torch.cat([states.initial(spans), x[rows].float()], dim=1)
        windows = inputs.unfold(1, taps + 1, 1)
        sums = torch.einsum("srct,tc->src", windows, weight)
        result[rows] = (sums if bias is None else sums + bias).to(x.dtype)
        states.store(inputs[:, inputs.shape[1] - taps :])
    return result


def gated_delta_twin(
    mixed: Tensor,
    gates: DeltaGates,
    pages: LayerPages,
    plan: AttentionPlan,
    *,
    key_heads: int,
    tiled: bool,
) -> Tensor:
    """The specification of `gated_delta`: `CHUNK` rows at once, by solving for their updates, or
    row by row if the elements of a key decay differently."""
    _, heads, key_dim, value_dim = pages.values.shape
    result = mixed.new_empty(len(mixed), heads, value_dim)
    sizes = (key_heads * key_dim, key_heads * key_dim, heads * value_dim)
    decays = F.softplus(gates.alphas.float() + gates.offsets).unflatten(1, (heads, -1))
    decays = gates.rates.unsqueeze(1) * decays
    advance = _advance if gates.decays == 1 else _advance_by_rows
    betas = gates.betas.float().sigmoid()
    at_once = max(1, TWIN_ELEMENTS // (heads * key_dim * value_dim))
    for spans, rows in groups_of_spans(plan.spans, mixed.device, at_once=at_once):
        queries, keys, values = (
            part.unflatten(2, (-1, dim)).transpose(1, 2)
            for part, dim in zip(
                mixed[rows].float().split(sizes, dim=2), (key_dim, key_dim, value_dim), strict=True
            )
        )
        queries, keys = _per_head(queries, heads, tiled), _per_head(keys, heads, tiled)
        states = States(pages.values, plan, rows)
        state, answers = states.initial(spans), []
        for first in range(0, rows.shape[1], CHUNK):
            some = slice(first, first + CHUNK)
            decay, beta = (t[rows[:, some]].transpose(1, 2) for t in (decays, betas))
            answer, state = advance(
                queries[:, :, some] * key_dim**-0.5,
                keys[:, :, some],
                values[:, :, some],
                decay,
                beta,
                state,
            )
            answers.append(answer)
        states.store(state)
        result[rows] = torch.cat(answers, dim=2).transpose(1, 2).to(mixed.dtype)
    return result


def _advance(
    queries: Tensor, keys: Tensor, values: Tensor, decays: Tensor, betas: Tensor, state: Tensor
) -> tuple[Tensor, Tensor]:
    """Rows [spans, heads, rows, dim], decays [spans, heads, rows, 1] and the state before them ->
    their results, the state after.

    The update of row i is d_i = beta_i (v_i - S_i^T k_i), where S_i is the decayed state with the
    updates d_j of the rows before: a triangular system.
    """
    left, rate = Decays.of(decays.squeeze(3)), betas.unsqueeze(3)
    system = rate * (keys @ keys.mT) * left.between
    system.diagonal(dim1=2, dim2=3).fill_(1.0)
    unknown = rate * (values - left.fade * (keys @ state))
    learnt = torch.linalg.solve_triangular(system, unknown, upper=False)
    answers = left.fade * (queries @ state) + ((queries @ keys.mT) * left.between) @ learnt
    return answers, left.fade[:, :, -1:] * state + (left.kept * keys).mT @ learnt


def _advance_by_rows(
    queries: Tensor, keys: Tensor, values: Tensor, decays: Tensor, betas: Tensor, state: Tensor
) -> tuple[Tensor, Tensor]:
    """The same for decays [spans, heads, rows, key_dim]."""
    answers = []
    for row in range(queries.shape[2]):
        query, key, value, decay, beta = (
            part[:, :, row : row + 1]
            for part in (queries, keys, values, decays, betas.unsqueeze(3))
        )
        state = decay.exp().mT * state
        state = state + key.mT @ (beta * (value - key @ state))
        answers.append(query @ state)
    return torch.cat(answers, dim=2), state


def _per_head(x: Tensor, heads: int, tiled: bool) -> Tensor:
    """Normalised and repeated: [spans, key heads, rows, dim] -> [spans, heads, rows, dim]."""
    x = x * torch.rsqrt(x.square().sum(dim=3, keepdim=True) + NORM_EPS)
    times = heads // x.shape[1]
    return x.repeat(1, times, 1, 1) if tiled else x.repeat_interleave(times, dim=1)


class _DeltaJob(ctypes.Structure):
    """`caravan_delta_job` in cpu/delta.c."""

    _fields_ = (
        *((name, ctypes.c_void_p) for name in (
            "mixed", "alphas", "betas", "rates", "offsets", "begins", "ends", "continues", "pages",
            "states", "result",
        )),
        *((name, ctypes.c_int32) for name in (
            "spans", "heads", "key_heads", "key_dim", "value_dim", "decays", "tiled",
        )),
    )  # fmt: skip
