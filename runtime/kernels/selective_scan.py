"""Selective scans over sequence states: state spaces with a decay for each element, as in Mamba."""

import ctypes
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from runtime.kernels.attention import TWIN_ELEMENTS
from runtime.kernels.native import address, library, row_address
from runtime.kernels.sequence_states import States, StepSpans, groups_of_spans
from runtime.kernels.triton.launch import has_kernels
from runtime.worker.model import AttentionPlan, LayerPages


@dataclass(frozen=True, slots=True, eq=False)
class ScanRows:
    """What a row's scan depends on: values and steps [tokens, channels], the latter before
    softplus; keys (B in the paper) and queries (C) [tokens, size], which all channels share."""

    values: Tensor
    steps: Tensor
    keys: Tensor
    queries: Tensor


@dataclass(frozen=True, slots=True, eq=False)
class Channels:
    """The parameters of the channels, float32: rates [channels, size], which are negative, offsets
    and skips [channels], as of `StateSpace`."""

    rates: Tensor
    offsets: Tensor
    skips: Tensor


def selective_scan(
    rows: ScanRows, channels: Channels, pages: LayerPages, plan: AttentionPlan
) -> Tensor:
    """Gu and Dao, "Mamba", section 3.3 -> [tokens, channels].

    Each channel has a state s [size]. A row with value v, step d, key k and query q updates it to
    s' = e^(rates d) s + d v k, element by element, and its result is q s' + skip * v.

    States are zero at position 0; pages.values [pages, channels, size, 1] has those of earlier
    steps and is overwritten. Computed in float32; the result is in the values' type. With C and
    Triton kernels, the bits of a row depend neither on other sequences nor on how its own is
    divided into steps.
    """
    device = rows.values.device
    if device.type != "cpu" or (kernels := library()) is None:
        if has_kernels(device):
            from runtime.kernels.triton import selective_scan as triton

            return triton.selective_scan(rows, channels, pages, plan)
        return selective_scan_twin(rows, channels, pages, plan)
    states, spans, tokens = pages.values, StepSpans.of(plan, len(rows.values)), len(rows.values)
    _, count, size, _ = states.shape
    wide = [part.float() for part in (rows.values, rows.steps, rows.keys, rows.queries)]
    widths = count, count, size, size
    result = torch.empty(tokens, count)
    job = _ScanJob(
        *(
            row_address(part, (tokens, width), torch.float32)
            for part, width in zip(wide, widths, strict=True)
        ),
        address(channels.rates, (count, size)), address(channels.offsets, (count,)),
        address(channels.skips, (count,)), *spans.addresses,
        address(states, (len(states), count, size, 1)), result.data_ptr(),
        *(part.stride(0) for part in wide), spans.count, count, size,
    )  # fmt: skip
    kernels.caravan_selective_scan(ctypes.byref(job), torch.get_num_threads())
    return result.to(rows.values.dtype)


def selective_scan_twin(
    rows: ScanRows, channels: Channels, pages: LayerPages, plan: AttentionPlan
) -> Tensor:
    """The specification of `selective_scan`."""
    _, count, size, _ = pages.values.shape
    result = torch.empty_like(rows.values)
    steps = F.softplus(rows.steps.float() + channels.offsets)
    at_once = max(1, TWIN_ELEMENTS // (count * size))
    for spans, places in groups_of_spans(plan.spans, result.device, at_once=at_once):
        states = States(pages.values, plan, places)
        state = states.initial(spans).squeeze(3)
        for row in places.unbind(1):
            value, key, query = (t[row].float() for t in (rows.values, rows.keys, rows.queries))
            step = steps[row].unsqueeze(2)
            state = (channels.rates * step).exp_() * state
            state += step * value.unsqueeze(2) * key.unsqueeze(1)
            answer = (state @ query.unsqueeze(2)).squeeze(2)
            result[row] = (answer + channels.skips * value).to(result.dtype)
        states.store(state.unsqueeze(3))
    return result


class _ScanJob(ctypes.Structure):
    """`caravan_selective_scan_job` in cpu/selective_scan.c."""

    _fields_ = (
        *((name, ctypes.c_void_p) for name in (
            "values", "steps", "keys", "queries", "rates", "offsets", "skips", "begins", "ends",
            "continues", "pages", "states", "result",
        )),
        *((name, ctypes.c_int64) for name in ("value_row", "step_row", "key_row", "query_row")),
        *((name, ctypes.c_int32) for name in ("spans", "channels", "size")),
    )  # fmt: skip
