"""State spaces with one decay per head and row over sequence states, as in Mamba 2."""

import ctypes
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from runtime.kernels.attention import TWIN_ELEMENTS
from runtime.kernels.native import address, library
from runtime.kernels.pointwise import contiguous
from runtime.kernels.sequence_states import CHUNK, Decays, States, StepSpans, groups_of_spans
from runtime.kernels.triton.launch import has_kernels
from runtime.worker.model import AttentionPlan, LayerPages


@dataclass(frozen=True, slots=True, eq=False)
class StateSpace:
    """The parameters of the heads, float32 [heads] each.

    A row's step is softplus(input + offset); the state decays by e^(rate * step), where rates are
    negative; `skip` times the row's value is added to its result.
    """

    rates: Tensor
    offsets: Tensor
    skips: Tensor


def state_space(
    mixed: Tensor,
    steps: Tensor,
    space: StateSpace,
    pages: LayerPages,
    plan: AttentionPlan,
    *,
    groups: int,
) -> Tensor:
    """Dao and Gu, "Transformers are SSMs", section 7 -> [tokens, heads, value_dim].

    Each head has a state S [key_dim, value_dim]. A row with value v, key k (B in the paper), query
    q (C) and step d updates it to S' = e^(rate d) S + k (d v)^T, and its result is
    S'^T q + skip * v.

    mixed [tokens, heads * value_dim + 2 * groups * key_dim]: values, keys, queries; head h uses the
    key and the query of group h // (heads / groups). steps [tokens, heads]: before softplus. States
    are zero at position 0; pages.values [pages, heads, key_dim, value_dim] has those of earlier
    steps and is overwritten. Computed in float32; the result is in mixed's type. With C and Triton
    kernels, the bits of a row depend neither on other sequences nor on how its own is divided into
    steps.
    """
    if mixed.device.type != "cpu" or (kernels := library()) is None:
        if has_kernels(mixed.device):
            from runtime.kernels.triton import state_space as triton

            return triton.state_space(mixed, steps, space, pages, plan, groups=groups)
        return state_space_twin(mixed, steps, space, pages, plan, groups=groups)
    states, spans, rows = pages.values, StepSpans.of(plan, len(mixed)), len(mixed)
    _, heads, key_dim, value_dim = states.shape
    if heads % groups:
        raise ValueError(f"{heads} heads cannot share the keys of {groups} groups")
    width = heads * value_dim + 2 * groups * key_dim
    wide, inputs = contiguous(mixed.float()), contiguous(steps.float())
    result = torch.empty(rows, heads, value_dim)
    job = _StateSpaceJob(
        address(wide, (rows, width)), address(inputs, (rows, heads)),
        address(space.rates, (heads,)), address(space.offsets, (heads,)),
        address(space.skips, (heads,)), *spans.addresses, address(states, states.shape),
        result.data_ptr(), spans.count, heads, groups, key_dim, value_dim,
    )  # fmt: skip
    kernels.caravan_state_space(ctypes.byref(job), torch.get_num_threads())
    return result.to(mixed.dtype)


def state_space_twin(
    mixed: Tensor,
    steps: Tensor,
    space: StateSpace,
    pages: LayerPages,
    plan: AttentionPlan,
    *,
    groups: int,
) -> Tensor:
    """The specification of `state_space`: `CHUNK` rows at once, as masked attention."""
    _, heads, key_dim, value_dim = pages.values.shape
    result = mixed.new_empty(len(mixed), heads, value_dim)
    sizes = (heads * value_dim, groups * key_dim, groups * key_dim)
    steps = F.softplus(steps.float() + space.offsets)
    at_once = max(1, TWIN_ELEMENTS // (heads * key_dim * value_dim))
    for spans, rows in groups_of_spans(plan.spans, mixed.device, at_once=at_once):
        values, keys, queries = (
            part.unflatten(2, (number, -1)).transpose(1, 2)
            for part, number in zip(
                mixed[rows].float().split(sizes, dim=2), (heads, groups, groups), strict=True
            )
        )
        keys, queries = (t.repeat_interleave(heads // groups, dim=1) for t in (keys, queries))
        states = States(pages.values, plan, rows)
        state, answers = states.initial(spans), []
        for first in range(0, rows.shape[1], CHUNK):
            some = slice(first, first + CHUNK)
            step = steps[rows[:, some]].transpose(1, 2)
            left = Decays.of(step * space.rates[:, None])
            learnt = step.unsqueeze(3) * values[:, :, some]
            key, query = keys[:, :, some], queries[:, :, some]
            answer = left.fade * (query @ state) + ((query @ key.mT) * left.between) @ learnt
            answers.append(answer + space.skips[:, None, None] * values[:, :, some])
            state = left.fade[:, :, -1:] * state + (left.kept * key).mT @ learnt
        states.store(state)
        result[rows] = torch.cat(answers, dim=2).transpose(1, 2).to(mixed.dtype)
    return result


class _StateSpaceJob(ctypes.Structure):
    """`caravan_state_space_job` in cpu/state_space.c."""

    _fields_ = (
        *((name, ctypes.c_void_p) for name in (
            "mixed", "steps", "rates", "offsets", "skips", "begins", "ends", "continues", "pages",
            "states", "result",
        )),
        *((name, ctypes.c_int32) for name in (
            "spans", "heads", "groups", "key_dim", "value_dim",
        )),
    )  # fmt: skip
