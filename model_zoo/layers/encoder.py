"""A text encoder put together from its layers: every row of a prompt sees all others."""

from collections.abc import Sequence

import torch
from torch import Tensor

from model_zoo.gguf.scope import Shape, TensorScope
from model_zoo.layers.linear import Embedding
from model_zoo.layers.sizes import Sizes
from model_zoo.layers.stack import Layer, LayerStack
from runtime.kernels.workspace import workspace_bytes
from runtime.kv.spec import LayerCache
from runtime.model import Batch, KVCache


class Encoder:
    """Embeddings of tokens, of the first kind of segment and of positions where the file has them,
    a norm, and layers; see runtime.model.DecoderModel. It draws no tokens."""

    def __init__(self, w: TensorScope, sizes: Sizes, layers: Sequence[Layer]) -> None:
        self.causal = self.generates = False
        self.context_length, self.hidden_size = sizes.context_length, sizes.hidden
        self._token_embd = w.embedding("token_embd", shape=(None, sizes.hidden))
        self.vocab_size = self._token_embd.rows
        shape = (None, sizes.hidden)
        self._token_types = (
            w.embedding("token_types", shape=shape) if w.has("token_types") else None
        )
        places = (sizes.context_length, sizes.hidden)
        has_places = w.has("position_embd")
        self._places = w.embedding("position_embd", shape=places) if has_places else None
        self._norm = w.layer_norm("token_embd_norm", sizes.eps, size=sizes.hidden)
        self._layers = LayerStack(layers)
        self._device = w.device
        self._weight_bytes = w.loaded_bytes

    @property
    def cache_layers(self) -> Sequence[LayerCache]:
        return self._layers.caches

    @property
    def weight_bytes(self) -> int:
        return self._weight_bytes

    def states(self, batch: Batch, cache: KVCache) -> Tensor:
        """[outputs, hidden_size]."""
        x = self._token_embd(batch.tokens)
        if self._token_types is not None:
            x = x + self._token_types(torch.zeros_like(batch.tokens[:1]))
        if self._places is not None:
            x = x + self._places(batch.positions)
        return self._layers(self._norm(x), batch, cache)

    def logits(self, states: Tensor) -> Tensor:
        raise AssertionError("an encoder draws no tokens")

    def activation_bytes(self, tokens: int, outputs: int) -> int:
        floats = tokens * (6 * self.hidden_size + self._layers.row_elements)
        return 4 * floats + workspace_bytes(
            self._device,
            largest_matrix=self._layers.matrix_elements,
            caches=self._layers.caches,
        )


def _optional_embedding(w: TensorScope, name: str, shape: Shape) -> Embedding | None:
    return w.embedding(name, shape=shape) if w.has(name) else None
