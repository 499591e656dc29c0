"""The head of a reranker: a score from the first hidden state of a query and a document."""

from dataclasses import dataclass

import torch
from torch import Tensor

from model_zoo.gguf.metadata import Metadata
from model_zoo.gguf.pooling_types import RANK, pooling_type
from model_zoo.gguf.scope import TensorScope
from model_zoo.layers.linear import Linear


@dataclass(frozen=True, slots=True, eq=False)
class Row:
    """weight [hidden]; bias [1] or none. x [n, hidden] -> [n, 1]."""

    weight: Tensor
    bias: Tensor | None

    def __call__(self, x: Tensor) -> Tensor:
        result = (x @ self.weight)[:, None]
        return result if self.bias is None else result + self.bias


@dataclass(frozen=True, slots=True, eq=False)
class RankingHead:
    """`output(tanh(dense(x)))`, or without `dense` `output(x)`, as in BERT and RoBERTa."""

    dense: Linear | None
    output: Linear | Row
    device: torch.device

    @classmethod
    def read(cls, w: TensorScope, metadata: Metadata) -> "RankingHead | None":
        """The head of a reranker; None in other files."""
        if pooling_type(metadata, w.has) != RANK:
            return None
        size = metadata.require_size("embedding_length")
        dense = w.linear("cls", shape=(size, size), optional=True)
        return cls(dense, _output(w, size), w.device)

    @torch.inference_mode()
    def __call__(self, states: Tensor) -> Tensor:
        """states float32 [n, hidden] -> float32 [n], unbounded: the higher, the more relevant."""
        x = states.to(self.device)
        if self.dense is not None:
            x = torch.tanh(self.dense(x))
        return self.output(x)[:, 0].cpu()


def _output(w: TensorScope, size: int) -> Linear | Row:
    """A matrix of one row, which llama.cpp's converter stored as a vector until 2025."""
    if w.shape("cls.output") != (size,):
        return w.linear("cls.output", shape=(1, size))
    bias = w.vector("cls.output.bias", size=1, bare=True, optional=True)
    return Row(w.vector("cls.output", size=size), bias)
