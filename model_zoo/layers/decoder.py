"""A text decoder made of layers; see runtime.worker.model.DecoderModel."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from model_zoo.gguf.scope import TensorScope
from model_zoo.layers.norm import LayerNorm, RMSNorm
from model_zoo.layers.rope import Pairs, Rotary
from model_zoo.layers.rope_scaling import read_rotary
from model_zoo.layers.rope_sections import in_sections
from model_zoo.layers.stack import LayeredModel, LayerInputs, LayerStack, Streams, TextLayer
from model_zoo.layers.text_sizes import TextSizes
from runtime.kernels.logit_columns import limit_columns
from runtime.kernels.pointwise import add_, scale_, softcap
from runtime.kernels.workspace import workspace_bytes
from runtime.worker.model import Batch, KeyRotation, KVCache

# Makes a layer of its tensors, its number, and the rotary embedding.
MakeLayer = Callable[[TensorScope, TextSizes, int, Rotary], TextLayer]


@dataclass(frozen=True, slots=True, eq=False)
class DecoderOptions:
    """The properties of decoders that differ between families, besides the layers.

    embedding_scale, embedding_norm: factor and norm of token embeddings, and if `images_as_tokens`
    of those of images. places: embeddings of positions, of which there are as many as the longest
    context has, are added.
    logit_scale, logit_softcap: applied to logits in this order. output_norm: None for the RMS norm
    `output_norm`, which the model lacks if not `has_output_norm`. head_rows: rows of the head, if
    it has fewer than the embedding. own_head: the head is never the embedding. embeds_by_head: the
    embedding is the head if the file has no other.
    image_elements: temporary elements of layers that attend to images while they store the rows of
    one image. layer_inputs: see `LayerInputs`. streams: see `Streams`.
    """

    embedding_scale: float | None = None
    images_as_tokens: bool = False
    places: bool = False
    embedding_norm: RMSNorm | LayerNorm | None = None
    logit_scale: float = 1.0
    logit_softcap: float | None = None
    output_norm: RMSNorm | LayerNorm | None = None
    has_output_norm: bool = True
    head_rows: int | None = None
    own_head: bool = False
    embeds_by_head: bool = False
    image_elements: int = 0
    layer_inputs: LayerInputs | None = None
    streams: Streams | None = None


class Decoder(LayeredModel):
    """Embedding, layers, norm and head.

    If ranks divide the model, each of them computes all states and all logits. Logits are -inf for
    rows of the embedding that no token of the file has, for those that the head lacks, and for
    tokens that the file suppresses.
    """

    def __init__(
        self,
        w: TensorScope,
        sizes: TextSizes,
        layers: Sequence[TextLayer],
        options: DecoderOptions | None = None,
    ) -> None:
        options = options or DecoderOptions()
        self.causal = self.generates = True
        self.context_length = sizes.context_length
        by_head = options.embeds_by_head and not w.has("token_embd")
        name = "output" if by_head else "token_embd"
        self._token_embd = w.embedding(name, shape=(None, sizes.hidden), divided=True)
        shape = (sizes.context_length, sizes.hidden)
        self._position_embd = w.embedding("position_embd", shape=shape) if options.places else None
        self._output_norm = options.output_norm
        if self._output_norm is None and options.has_output_norm:
            self._output_norm = w.rms_norm("output_norm", sizes.eps, size=sizes.hidden)
        self.vocab_size = self._token_embd.rows
        rows = options.head_rows or self.vocab_size or None
        alt = None if options.head_rows or options.own_head else "token_embd"
        self._output = w.gathered_linear("output", alt=alt, shape=(rows, sizes.hidden))
        self._known_tokens = sizes.known_tokens or self.vocab_size
        suppressed = sizes.suppressed_tokens(self.vocab_size)
        self._suppressed = torch.tensor(suppressed, device=w.device) if suppressed else None
        self._layers = LayerStack(
            layers,
            inputs=options.layer_inputs,
            streams=options.streams,
            ranks=w.ranks,
            layer_placement=w.layer_placement,
        )
        self._options = options
        self.hidden_size, self._device = sizes.hidden, w.device
        self._held, self._added_elements = w.held, w.added_row_elements

    @property
    def position_axes(self) -> int:
        return self._layers.position_axes

    @property
    def key_rotations(self) -> Sequence[KeyRotation | None] | None:
        """None with embeddings of positions: keys of other positions are other keys."""
        return self._layers.key_rotations if self._position_embd is None else None

    def states(self, batch: Batch, cache: KVCache) -> Tensor:
        """float32 [outputs, hidden], after the output norm."""
        x = self._token_embd(batch.tokens)
        if not self._options.images_as_tokens:
            x = self._scaled(x)
        if self._position_embd is not None:
            x = add_(x, self._position_embd(batch.positions))
        if batch.image_rows is not None:
            assert batch.image_features is not None
            features = batch.image_features[:, : self.hidden_size]
            x.index_copy_(0, batch.image_rows, features.to(x.dtype))
        if self._options.images_as_tokens:
            x = self._scaled(x)
        residual = self._layers(x, batch, cache)
        if self._output_norm is None:
            return residual.computed().float()
        return residual.normed_states(self._output_norm)

    def _scaled(self, x: Tensor) -> Tensor:
        scale, norm = self._options.embedding_scale, self._options.embedding_norm
        if scale is not None:
            x = scale_(x, scale)
        return x if norm is None else norm(x)

    def logits(self, states: Tensor) -> Tensor:
        """float32 [rows, vocab_size] of states in float32: in bfloat16, logits between 16 and 32
        would have steps of 0.125, which makes ties and coarse log-probabilities."""
        logits = self._output(states)
        if self._options.logit_scale != 1.0:
            logits = scale_(logits, self._options.logit_scale)
        if self._options.logit_softcap is not None:
            logits = softcap(logits, self._options.logit_softcap)
        known = min(self._known_tokens, logits.shape[1])
        return limit_columns(logits, known, self.vocab_size, self._suppressed)

    def activation_bytes(self, tokens: int, outputs: int) -> int:
        """The rows of the residual, and the widest step of a layer, in float32 as kernels
        compute."""
        row = 4 * self.hidden_size
        layer = self._layers.row_elements + self._added_elements
        floats = tokens * (row + layer) + self._options.image_elements
        head = self._output.row_elements + self._output.added_elements
        floats += outputs * (row + 3 * self.vocab_size + head)
        matrix = max(self._layers.matrix_elements, self.hidden_size * self.vocab_size)
        return 4 * floats + workspace_bytes(
            self._device, largest_matrix=matrix, caches=self._layers.caches
        )


def uniform_decoder(
    w: TensorScope,
    sizes: TextSizes,
    pairs: Pairs,
    layer: MakeLayer,
    *,
    dim: int | None = None,
    default_base: float | None = None,
    sections: Sequence[int] = (),
    interleaved: bool = False,
    options: DecoderOptions | None = None,
) -> Decoder:
    """A decoder whose layers are all made by `layer` and have the rotary embedding that the file
    describes. dim: its dimensions, overrides those that the file states. default_base: its base if
    the file states none, which is required otherwise. sections: the usual numbers of frequencies
    that are rotated by time, row and column, consecutive or interleaved; empty for a rotation by
    one position."""
    rotary = read_rotary(w, sizes, pairs, dim=dim, default_base=default_base)
    if sections:
        rotary = in_sections(rotary, sizes.metadata, default=sections, interleaved=interleaved)
    layers = [layer(w.scope("blk", i), sizes, i, rotary) for i in range(sizes.layers)]
    return Decoder(w, sizes, layers, options)


def biased_output_norm(w: TensorScope, sizes: TextSizes) -> DecoderOptions:
    """The layer norm `output_norm` with a bias before the head."""
    w.need_biases("output_norm")
    return DecoderOptions(output_norm=w.layer_norm("output_norm", sizes.eps, size=sizes.hidden))
