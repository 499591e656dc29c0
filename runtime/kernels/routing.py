"""Choice of the experts of each row, and of their weights, from a router's logits."""

import ctypes
from dataclasses import dataclass
from enum import IntEnum

import torch
from torch import Tensor

from runtime.kernels.native import address, library
from runtime.kernels.selection import highest


class Scores(IntEnum):
    """How logits become scores; the numbers are those of cpu/routing.c."""

    SOFTMAX = 0
    SIGMOID = 1
    SOFTMAX_OF_CHOSEN = 2  # softmax over the chosen experts only
    SOFTMAX_OF_NEAR = 3  # softmax over the expert and those that are near it, see `near`


@dataclass(frozen=True, slots=True, eq=False)
class Routing:
    """How experts are chosen; logits float32 [tokens, experts] and the number of experts per row ->
    chosen int64 [tokens, used], best first, and weights float32 [tokens, used].

    Experts with the highest logits are chosen, of equal ones the first; with `bias` or groups those
    with the highest scores, plus `bias` float32 [experts]. Experts form `groups` of equal size;
    only those in the `used_groups` best are chosen. A group's value is that of its best expert or,
    with `group_pairs`, the sum of its two best. Weights are the scores of the chosen experts, not
    biased, divided by their sum if `renormalised`, times `scale`. With SOFTMAX_OF_NEAR, the score
    of a chosen expert with logit a is its softmax over itself and the experts below it with a logit
    x for which a - x is at most `near` * max(|x|, a).

    Shazeer et al., "Outrageously Large Neural Networks"; for groups and bias, DeepSeek-V2, section
    2.1.2, and DeepSeek-V3, 2.1.2; for near experts, Liu et al., "GRIN", section 2. With C kernels,
    the bits of a row do not depend on other rows.
    """

    scores: Scores
    groups: int = 1
    used_groups: int = 1
    group_pairs: bool = False
    bias: Tensor | None = None
    renormalised: bool = False
    scale: float = 1.0
    near: float = 0.0

    def __post_init__(self) -> None:
        by_scores = self.bias is not None or self.used_groups < self.groups
        assert not (by_scores and self.scores >= Scores.SOFTMAX_OF_CHOSEN)

    def __call__(self, logits: Tensor, used: int) -> tuple[Tensor, Tensor]:
        if logits.device.type != "cpu" or (kernels := library()) is None:
            return routing_twin(self, logits, used)
        (tokens, experts), bias = logits.shape, self.bias
        logits = logits.contiguous()
        chosen = torch.empty(tokens, used, dtype=torch.int64)
        weights = torch.empty(tokens, used)
        job = _RoutingJob(
            address(logits, (tokens, experts)), None if bias is None else address(bias, (experts,)),
            chosen.data_ptr(), weights.data_ptr(), self.scale, self.near, tokens, experts, used,
            self.scores, self.groups, self.used_groups, self.group_pairs, self.renormalised,
        )  # fmt: skip
        if kernels.caravan_route(ctypes.byref(job), torch.get_num_threads()):
            raise ValueError(f"{used} of {experts} experts in {self.groups} groups")
        return chosen, weights


def routing_twin(rule: Routing, logits: Tensor, used: int) -> tuple[Tensor, Tensor]:
    """The specification of `Routing.__call__`."""
    if rule.scores == Scores.SOFTMAX_OF_CHOSEN:
        chosen = highest(logits, used)
        return chosen, logits.gather(1, chosen).softmax(dim=-1) * rule.scale
    if rule.scores == Scores.SOFTMAX_OF_NEAR:
        chosen = highest(logits, used)
        return chosen, _of_near(rule, logits, chosen)
    scores = logits.softmax(dim=-1) if rule.scores == Scores.SOFTMAX else _sigmoid(logits)
    ranked = logits
    if rule.bias is not None or rule.used_groups < rule.groups:
        ranked = _within_groups(rule, scores if rule.bias is None else scores + rule.bias)
    chosen = highest(ranked, used)
    weights = scores.gather(1, chosen)
    if rule.renormalised:
        weights = weights / weights.sum(dim=-1, keepdim=True)
    return chosen, weights * rule.scale


def _of_near(rule: Routing, logits: Tensor, chosen: Tensor) -> Tensor:
    """The weights of chosen experts, [tokens, used] each."""
    left, weights = logits, []
    for choice in chosen.split(1, dim=1):
        best = logits.gather(1, choice)
        far = (best - logits) / logits.abs().maximum(best) > rule.near
        weights.append(left.masked_fill(far, -torch.inf).softmax(dim=-1).gather(1, choice))
        left = left.scatter(1, choice, -torch.inf)
    scores = torch.cat(weights, dim=1)
    if rule.renormalised:
        scores = scores / scores.sum(dim=-1, keepdim=True)
    return scores * rule.scale


def _sigmoid(logits: Tensor) -> Tensor:
    """The last bit of torch's own sigmoid depends on an element's memory address."""
    return 1 / (1 + logits.neg().exp())


def _within_groups(rule: Routing, values: Tensor) -> Tensor:
    """values [tokens, experts] -> the same with -inf for experts outside the best groups."""
    if rule.used_groups == rule.groups:
        return values
    grouped = values.unflatten(1, (rule.groups, -1))
    summed = 2 if rule.group_pairs and grouped.shape[2] > 1 else 1
    best = grouped.topk(summed, dim=-1).values.sum(dim=-1)
    kept = torch.zeros_like(best, dtype=torch.bool)
    kept.scatter_(1, highest(best, rule.used_groups), value=True)
    return grouped.masked_fill(~kept.unsqueeze(-1), -torch.inf).flatten(1)


class _RoutingJob(ctypes.Structure):
    """`caravan_routing_job` in cpu/routing.c."""

    _fields_ = (
        *((name, ctypes.c_void_p) for name in ("logits", "bias", "chosen", "weights")),
        *((name, ctypes.c_float) for name in ("scale", "near")),
        *((name, ctypes.c_int32) for name in (
            "rows", "experts", "used", "scores", "groups", "used_groups", "group_pairs",
            "renormalised",
        )),
    )  # fmt: skip
