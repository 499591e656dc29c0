"""How a router's logits become the experts of each row and their weights."""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from model_zoo.gguf.metadata import Metadata
from runtime.kernels.selection import highest

# logits float32 [tokens, experts] and the number of experts per row
# -> chosen int64 [tokens, used] and weights float32 [tokens, used]
Routing = Callable[[Tensor, int], tuple[Tensor, Tensor]]


def softmax_of_all(logits: Tensor, used: int) -> tuple[Tensor, Tensor]:
    """Weights are the probabilities of the chosen experts in the softmax over all experts.

    Shazeer et al., "Outrageously Large Neural Networks", before renormalisation.
    """
    chosen = highest(logits, used)
    return chosen, logits.softmax(dim=-1).gather(1, chosen)


def softmax_of_chosen(logits: Tensor, used: int) -> tuple[Tensor, Tensor]:
    """Weights are the softmax over the chosen experts: `softmax_of_all`, renormalised."""
    chosen = highest(logits, used)
    return chosen, logits.gather(1, chosen).softmax(dim=-1)


def stated_softmax(metadata: Metadata) -> Routing:
    """`softmax_of_chosen` unless the file states that weights are not renormalised.

    Two keys state it; where they differ, `norm_top_k_prob` takes precedence.
    """
    renormalised = metadata.get("expert_weights_norm", bool, True)
    renormalised = metadata.get("norm_top_k_prob", bool, renormalised)
    return softmax_of_chosen if renormalised else softmax_of_all


def sigmoid_of_chosen(logits: Tensor, used: int) -> tuple[Tensor, Tensor]:
    """Weights are the sigmoids of the chosen logits, as in Llama 4."""
    chosen = highest(logits, used)
    return chosen, sigmoid(logits.gather(1, chosen))


@dataclass(frozen=True, slots=True, eq=False)
class GroupLimited:
    """Experts are chosen from the best groups only (DeepSeek-V2, section 2.2.2; V3, 2.1.2).

    `scores` turns logits into scores. Experts form `groups` of equal size; those outside the
    `used_groups` best are not chosen. A group's score is that of its best expert or, with
    `group_pairs`, the sum of its two best. `bias` float32 [experts] is added to the scores for the
    choice only. Weights are the scores of the chosen experts, divided by their sum if
    `renormalised`, times `scale`.
    """

    scores: Callable[[Tensor], Tensor]
    groups: int = 1
    used_groups: int = 1
    group_pairs: bool = False
    bias: Tensor | None = None
    renormalised: bool = False
    scale: float = 1.0

    def __call__(self, logits: Tensor, used: int) -> tuple[Tensor, Tensor]:
        scores = self.scores(logits)
        chosen = highest(self._allowed(scores if self.bias is None else scores + self.bias), used)
        weights = scores.gather(1, chosen)
        if self.renormalised:
            weights = weights / weights.sum(dim=-1, keepdim=True)
        return chosen, weights * self.scale

    def _allowed(self, scores: Tensor) -> Tensor:
        """scores [tokens, experts] -> the same with -inf for experts outside the best groups."""
        if self.used_groups == self.groups:
            return scores
        grouped = scores.unflatten(1, (self.groups, -1))
        best = grouped.topk(2 if self.group_pairs else 1, dim=-1).values.sum(dim=-1)
        kept = torch.zeros_like(best, dtype=torch.bool)
        kept.scatter_(1, highest(best, self.used_groups), value=True)
        return grouped.masked_fill(~kept.unsqueeze(-1), -torch.inf).flatten(1)


def softmax(logits: Tensor) -> Tensor:
    return logits.softmax(dim=-1)


def sigmoid(logits: Tensor) -> Tensor:
    """Elementwise. The last bit of torch's own sigmoid depends on an element's memory address."""
    return 1 / (1 + logits.neg().exp())
