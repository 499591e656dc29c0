"""The recurrence of RWKV 7 over sequence states."""

import ctypes
import math
from dataclasses import dataclass

import torch
from torch import Tensor

from runtime.kernels.attention import TWIN_ELEMENTS
from runtime.kernels.native import address, library
from runtime.kernels.pointwise import contiguous
from runtime.kernels.sequence_states import States, StepSpans, groups_of_spans
from runtime.kernels.triton.launch import has_kernels
from runtime.worker.model import AttentionPlan, LayerPages

# The least logarithm of a decay, so that an element keeps at least 0.545 of itself.
LEAST_LOG = -math.exp(-0.5)
# The least length by which keys are divided.
LEAST_LENGTH = 1e-12


@dataclass(frozen=True, slots=True, eq=False)
class WkvRows:
    """What a row's update depends on, [tokens, heads * size] each: queries (r in the paper), decays
    (w) and rates (a) before the logistic function, keys (k) and values (v)."""

    queries: Tensor
    decays: Tensor
    keys: Tensor
    values: Tensor
    rates: Tensor


@dataclass(frozen=True, slots=True, eq=False)
class WkvHeads:
    """The parameters of the heads, float32 [heads * size] each: factors of keys that are removed
    (k_k in the authors' code), parts of the rates in keys that are added (k_a), and factors of
    rows' own values (r_k)."""

    removed: Tensor
    added: Tensor
    own: Tensor


def wkv7(
    rows: WkvRows, heads: WkvHeads, pages: LayerPages, plan: AttentionPlan
) -> tuple[Tensor, Tensor]:
    """Peng et al., "RWKV-7", section 4 -> what the states answer, and the part of the row itself,
    [tokens, heads, size] each.

    Each head has a state S [keys, values]. A row has the rates a = sigmoid(rate), the decays
    d = e^(LEAST_LOG sigmoid(decay)), the unit vector u of its key times `removed`, and the key
    k = key * (1 + (a - 1) * added). It updates the state to S' = d S - (a u) (S^T u)^T + k value^T,
    and answers S'^T q; its own part is (q * own * k) summed, times its value.

    States are zero at position 0; pages.values [pages, heads, size, size] has those of earlier
    steps and is overwritten. Computed in float32; the results are in the type of the values. With C
    and Triton kernels, the bits of a row depend neither on other sequences nor on how its own is
    divided into steps.
    """
    device = rows.values.device
    if device.type != "cpu" or (kernels := library()) is None:
        if has_kernels(device):
            from runtime.kernels.triton import wkv

            return wkv.wkv7(rows, heads, pages, plan)
        return wkv7_twin(rows, heads, pages, plan)
    states, tokens = pages.values, len(rows.values)
    _, count, size, _ = states.shape
    spans, inner = StepSpans.of(plan, tokens), count * size
    parts = (rows.queries, rows.decays, rows.keys, rows.values, rows.rates)
    wide = [contiguous(part.float()) for part in parts]
    answers, own = torch.empty(tokens, count, size), torch.empty(tokens, count, size)
    job = _WkvJob(
        *(address(part, (tokens, inner)) for part in wide),
        *(address(part, (inner,)) for part in (heads.removed, heads.added, heads.own)),
        *spans.addresses, address(states, (len(states), count, size, size)),
        answers.data_ptr(), own.data_ptr(), spans.count, count, size,
    )  # fmt: skip
    kernels.caravan_wkv7(ctypes.byref(job), torch.get_num_threads())
    return answers.to(rows.values.dtype), own.to(rows.values.dtype)


def wkv7_twin(
    rows: WkvRows, heads: WkvHeads, pages: LayerPages, plan: AttentionPlan
) -> tuple[Tensor, Tensor]:
    """The specification of `wkv7`."""
    _, count, size, _ = pages.values.shape
    queries, keys, values = (
        part.float().unflatten(1, (count, size)) for part in (rows.queries, rows.keys, rows.values)
    )
    decays, rates = (
        part.float().sigmoid().unflatten(1, (count, size)) for part in (rows.decays, rows.rates)
    )
    removed, added, factors = (
        part.unflatten(0, (count, size)) for part in (heads.removed, heads.added, heads.own)
    )
    units = torch.nn.functional.normalize(keys * removed, dim=2, eps=LEAST_LENGTH)
    keys, kept = keys * (1 + (rates - 1) * added), (LEAST_LOG * decays).exp()
    answers = torch.empty_like(values)
    at_once = max(1, TWIN_ELEMENTS // (count * size * size))
    for spans, places in groups_of_spans(plan.spans, values.device, at_once=at_once):
        states = States(pages.values, plan, places)
        state = states.initial(spans)
        for row in places.unbind(1):
            unit = units[row]
            known = (unit.unsqueeze(3) * state).sum(dim=2, keepdim=True)
            state = kept[row].unsqueeze(3) * state - (rates[row] * unit).unsqueeze(3) * known
            state = state + keys[row].unsqueeze(3) * values[row].unsqueeze(2)
            answers[row] = (queries[row].unsqueeze(3) * state).sum(dim=2)
        states.store(state)
    own = (queries * factors * keys).sum(dim=2, keepdim=True) * values
    return answers.to(rows.values.dtype), own.to(rows.values.dtype)


class _WkvJob(ctypes.Structure):
    """`caravan_wkv7_job` in cpu/wkv.c."""

    _fields_ = (
        *((name, ctypes.c_void_p) for name in (
            "queries", "decays", "keys", "values", "rates", "removed", "added", "own_factors",
            "begins", "ends", "continues", "pages", "states", "answers", "own",
        )),
        *((name, ctypes.c_int32) for name in ("spans", "heads", "size")),
    )  # fmt: skip
