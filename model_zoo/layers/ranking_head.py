"""The head of a reranker: a score from the pooled state of a query and a document."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import MappingProxyType

import torch
import torch.nn.functional as F
from torch import Tensor

from model_zoo.families import Ranking
from model_zoo.gguf.metadata import Metadata
from model_zoo.gguf.pooling_types import CLS, LAST, MEAN, NAMES, RANK, pooling_type
from model_zoo.gguf.scope import TensorScope
from model_zoo.layers.linear import Linear
from model_zoo.layers.norm import LayerNorm
from runtime.errors import UnsupportedModelError

POOLING, EPS = "classifier.pooling_type", "attention.layer_norm_epsilon"
LABELS, ANSWERS = "classifier.output_labels", ("yes", "no")
_CURVES: Mapping[str, Callable[[Tensor], Tensor]] = MappingProxyType(
    {"tanh": torch.tanh, "gelu": F.gelu}
)


@dataclass(frozen=True, slots=True, eq=False)
class RankingHead:
    """`output(norm(curve(dense(x))))`; without `dense` `output(x)`, and norm only if there is one.

    pooling: what x is the state of, as of `Ranking`. output: one row, or two: those of the answers
    yes and no, whose difference is the logit of the probability of yes.
    """

    pooling: str
    dense: Linear | None
    curve: Callable[[Tensor], Tensor]
    norm: LayerNorm | None
    output: Linear
    device: torch.device

    @classmethod
    def read(
        cls, w: TensorScope, metadata: Metadata, ranking: Ranking | None
    ) -> "RankingHead | None":
        """The head of a reranker; None in other files. UnsupportedModelError for a head that
        classifies by several labels."""
        if ranking is None or pooling_type(metadata, w.has) != RANK:
            return None
        size = metadata.require_size("embedding_length")
        dense = None
        if ranking.last != "cls":
            dense = w.linear("cls", shape=(size, size), optional=True)
        norm = None
        if dense is not None and w.has("cls.norm"):
            norm = w.layer_norm("cls.norm", metadata.get_positive(EPS, ranking.eps), size=size)
        pooling, output = _pooling(metadata, ranking), _output(w, metadata, ranking.last, size)
        return cls(pooling, dense, _CURVES[ranking.curve], norm, output, w.device)

    @torch.inference_mode()
    def __call__(self, states: Tensor) -> Tensor:
        """states float32 [n, hidden] -> float32 [n], unbounded: the higher, the more relevant."""
        x = states.to(self.device)
        if self.dense is not None:
            x = self.curve(self.dense(x))
            x = x if self.norm is None else self.norm(x)
        scores = self.output(x)
        logits = scores[:, 0] if scores.shape[1] == 1 else scores[:, 0] - scores[:, 1]
        return logits.cpu()


def _pooling(metadata: Metadata, ranking: Ranking) -> str:
    """As the file states for its classifier, else as usual in the family."""
    stated = metadata.get(POOLING, int)
    if stated not in (None, MEAN, CLS, LAST):
        raise metadata.error(POOLING, f"is {stated}, which is unknown")
    return ranking.pooling if stated is None else NAMES[stated]


def _output(w: TensorScope, metadata: Metadata, name: str, size: int) -> Linear:
    """A matrix of one row, or of two for the answers."""
    labels = metadata.get_array(LABELS, str) or ()
    if len(labels) > 1 and labels != ANSWERS:
        raise UnsupportedModelError(
            f"{metadata.path}: classifies texts by {len(labels):,} labels "
            f"(`{metadata.full_key(LABELS)}`); rerankers have one, or {' and '.join(ANSWERS)}."
        )
    return w.linear(name, shape=(max(len(labels), 1), size))
