"""A bidirectional text encoder: every row of a prompt attends to all others."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from model_zoo.gguf.pooling_types import RANK, pooling_type
from model_zoo.gguf.scope import TensorScope
from model_zoo.layers.linear import Embedding
from model_zoo.layers.norm import LayerNorm, RMSNorm
from model_zoo.layers.stack import LayeredModel, LayerStack, TextLayer
from model_zoo.layers.text_sizes import TextSizes
from runtime.kernels.pointwise import scale_
from runtime.kernels.workspace import workspace_bytes
from runtime.worker.model import Batch, KVCache


@dataclass(frozen=True, slots=True, eq=False)
class EncoderOptions:
    """The properties of encoders that differ between families, besides the layers.

    places: embeddings of positions are added. embedding_scale: factor of token embeddings.
    embedding_norm: applied to the sum of the embeddings. output_norm: applied to the result of the
    layers.
    """

    places: bool = False
    embedding_scale: float | None = None
    embedding_norm: LayerNorm | None = None
    output_norm: RMSNorm | LayerNorm | None = None


class TextEncoder(LayeredModel):
    """Embeddings of tokens, of token types (if the file has any) and of positions; layers; a norm
    before or after them. Implements runtime.worker.model.DecoderModel without logits.

    Tokens have the first type; in rerankers with BERT's tokenizer, tokens after the first separator
    have the second type.
    """

    def __init__(
        self,
        w: TensorScope,
        sizes: TextSizes,
        layers: Sequence[TextLayer],
        options: EncoderOptions,
    ) -> None:
        self.causal = self.generates = False
        self.position_axes = 1
        self.context_length, self.hidden_size = sizes.context_length, sizes.hidden
        self._token_embd = w.embedding("token_embd", shape=(None, sizes.hidden))
        self.vocab_size = self._token_embd.rows
        self._token_types = _token_types(w, sizes)
        self._separator = _separator(w, sizes, self._token_types)
        shape = (sizes.context_length, sizes.hidden)
        self._position_embd = w.embedding("position_embd", shape=shape) if options.places else None
        self._scale, self._output_norm = options.embedding_scale, options.output_norm
        self._norm = options.embedding_norm
        self._layers = LayerStack(layers, ranks=w.ranks, layer_placement=w.layer_placement)
        self._device = w.device
        self._held, self._added_elements = w.held, w.added_row_elements

    @property
    def key_rotations(self) -> None:
        """None: cached keys are used in one step only."""

    def states(self, batch: Batch, cache: KVCache) -> Tensor:
        """[outputs, hidden_size]."""
        x = self._token_embd(batch.tokens)
        if self._scale is not None:
            x = scale_(x, self._scale)
        if self._token_types is not None:
            x = x + self._token_types(self._types(batch))
        if self._position_embd is not None:
            x = x + self._position_embd(batch.positions)
        if self._norm is not None:
            x = self._norm(x)
        states = self._layers(x, batch, cache)
        if self._output_norm is None:
            return states.computed()
        return states.normed_states(self._output_norm)

    def _types(self, batch: Batch) -> Tensor:
        """[tokens], or [1] if all have the same type. The rows of a prompt are in one step."""
        if self._separator is None:
            return torch.zeros_like(batch.tokens[:1])
        separators = (batch.tokens == self._separator).long()
        before = separators.cumsum(0) - separators
        rows = torch.arange(len(batch.tokens), device=batch.tokens.device)
        first = (rows - batch.positions).clamp_(min=0)
        return (before > before[first]).long()

    def logits(self, states: Tensor) -> Tensor:
        raise AssertionError("a text encoder computes no logits")

    def activation_bytes(self, tokens: int, outputs: int) -> int:
        layer = self._layers.row_elements + self._added_elements
        floats = tokens * (6 * self.hidden_size + layer)
        return 4 * floats + workspace_bytes(
            self._device,
            largest_matrix=self._layers.matrix_elements,
            caches=self._layers.caches,
        )


def embedding_norm(w: TensorScope, sizes: TextSizes, *, biased: bool = True) -> LayerNorm:
    """`token_embd_norm`; `biased`: it has a bias."""
    if biased:
        w.need_biases("token_embd_norm")
    return w.layer_norm("token_embd_norm", sizes.eps, size=sizes.hidden)


def _token_types(w: TensorScope, sizes: TextSizes) -> Embedding | None:
    """The embedding of token types; None if the file has none, and states at most one type, as
    llama.cpp's converter does for DistilBERT."""
    count = sizes.metadata.get("tokenizer.ggml.token_type_count", int, 0)
    if count <= 1 and not w.has("token_types"):
        return None
    return w.embedding("token_types", shape=(count or None, sizes.hidden))


def _separator(w: TensorScope, sizes: TextSizes, types: Embedding | None) -> int | None:
    """The token that ends the query of a reranker with two token types; None without, and for other
    tokenizers than BERT's, such as RoBERTa's, which give all tokens the first type."""
    metadata = sizes.metadata
    ranks = pooling_type(metadata, w.has) == RANK
    by_pieces = metadata.get("tokenizer.ggml.model", str) == "bert"
    if not ranks or not by_pieces or types is None or types.rows < 2:
        return None
    return metadata.get("tokenizer.ggml.seperator_token_id", int)
