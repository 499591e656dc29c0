"""The head of an embedding model: matrices that map the pooled states of texts to their vectors."""

from dataclasses import dataclass

import torch
from torch import Tensor

from model_zoo.gguf.metadata import Metadata
from model_zoo.gguf.pooling_types import keeps_token_vectors
from model_zoo.gguf.scope import TensorScope
from model_zoo.layers.linear import Linear
from runtime.errors import UnsupportedModelError


@dataclass(frozen=True, slots=True, eq=False)
class EmbeddingHead:
    """The modules `Dense`, without activation, that follow pooling in sentence-transformers."""

    matrices: tuple[Linear, ...]
    device: torch.device

    @classmethod
    def read(cls, w: TensorScope, metadata: Metadata) -> "EmbeddingHead | None":
        """`dense_2`, and after it `dense_3`; None for a file that has neither. Ollama's names are
        `dense.0` and `dense.1`.

        UnsupportedModelError if the file has a matrix, but states no pooling: its model computes a
        vector for each token, as ColBERT does.
        """
        hidden = metadata.require_size("embedding_length")
        first = w.linear("dense_2", alt="dense.0", shape=(None, hidden), optional=True)
        if first is None:
            return None
        if keeps_token_vectors(metadata, w.has):
            raise UnsupportedModelError(
                f"{metadata.path}: has a matrix for states, but no pooling "
                f"(`{metadata.full_key('pooling_type')}`); models with a vector for each token are "
                "not supported."
            )
        outs = first.weight.shape[0]
        second = w.linear("dense_3", alt="dense.1", shape=(None, outs), optional=True)
        return cls((first,) if second is None else (first, second), w.device)

    @torch.inference_mode()
    def __call__(self, states: Tensor) -> Tensor:
        """states float32 [n, hidden] -> float32 [n, outputs of the last matrix]."""
        x = states.to(self.device)
        for matrix in self.matrices:
            x = matrix(x)
        return x.cpu()
