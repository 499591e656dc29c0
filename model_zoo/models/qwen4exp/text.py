"""Qwen 4 Experimental: gated delta nets, sparse attention in every fourth layer, residual streams
with hyper-connections, and embeddings of n-grams."""

from dataclasses import dataclass, replace

from torch import Tensor

from model_zoo.gguf.metadata import Metadata
from model_zoo.gguf.scope import TensorScope
from model_zoo.layers.attention import OutputGate, SelfAttention, head_norms
from model_zoo.layers.block_indexer import BlockIndexer, BlockSizes
from model_zoo.layers.decoder import Decoder, DecoderOptions, TextLayer
from model_zoo.layers.delta_net import GatedDeltaNet
from model_zoo.layers.experts import ExpertOptions, Experts
from model_zoo.layers.hybrid import read_sizes, recurrent_layers
from model_zoo.layers.hyper_connections import (
    ConnectedBlock,
    CopiedStreams,
    GatedConnection,
    StreamSizes,
)
from model_zoo.layers.ngram_embedding import NgramEmbedding, NgramSizes, NgramTable
from model_zoo.layers.rope import Pairs, Rotary
from model_zoo.layers.rope_scaling import read_rotary
from model_zoo.layers.rope_sections import in_sections
from model_zoo.layers.routing import SOFTMAX_OF_CHOSEN
from model_zoo.layers.shared_expert import SharedExpert
from model_zoo.layers.state_sizes import StateSizes
from model_zoo.layers.step import Step
from model_zoo.layers.text_sizes import TextSizes
from runtime.kernels.pointwise import sigmoid_mul
from runtime.kv.cache_kinds import Full

# As in Qwen4ExpTextConfig of `transformers`.
DEFAULT_HEAD_DIM, FULL_EVERY, SECTIONS = 256, 4, (11, 11, 10)
_NGRAM_LAYERS = "ple.layers"


def build_decoder(w: TensorScope, metadata: Metadata) -> Decoder:
    """The layer norms of other models are those of the hyper-connections, of which the last one
    takes the place of the output norm."""
    sizes = read_sizes(w, metadata, head_dim=DEFAULT_HEAD_DIM)
    streams, delta = StreamSizes.read(metadata), StateSizes.read(metadata)
    rotary = read_rotary(w, sizes, Pairs.NEOX)
    rotary = in_sections(rotary, metadata, default=SECTIONS, interleaved=True)
    recurrent = recurrent_layers(sizes, full_every=FULL_EVERY)
    with_ngrams = _layer_with_ngrams(metadata, recurrent)
    layers = []
    for index in range(sizes.layers):
        scope = w.scope("blk", index)
        if not recurrent[index]:
            layers.append(_attending_layer(scope, sizes, streams, index, rotary))
            continue
        net = GatedDeltaNet(
            scope, hidden=sizes.hidden, sizes=delta, eps=sizes.eps, tiled=True, gate=sigmoid_mul
        )
        block = _block(scope, sizes, streams, net)
        if index != with_ngrams:
            layers.append(TextLayer(block, delta.cache))
            continue
        ngrams = NgramSizes.read(metadata)
        embedding = NgramEmbedding(scope, sizes, streams, NgramTable(w, metadata, ngrams))
        own = ngrams.cache(streams, sizes.hidden)
        layers.append(TextLayer(_NgramBlock(embedding, block), delta.cache, beside=own))
    ends = CopiedStreams(w, "output_hc", sizes, streams)
    return Decoder(w, sizes, layers, DecoderOptions(has_output_norm=False, streams=ends))


def _attending_layer(
    w: TensorScope, sizes: TextSizes, streams: StreamSizes, index: int, rotary: Rotary
) -> TextLayer:
    rotated = 2 * len(rotary.frequencies)
    blocks = BlockSizes.read(sizes.metadata, index, rotated=rotated)
    scope, indexer, keys = w.scope("indexer"), None, None
    if blocks is None:
        scope.ignore_all()
    else:
        indexer = BlockIndexer(scope, sizes, blocks, rotary)
        keys = blocks.index.cache(Full())
    cache = sizes.cache(index, Full())
    options = replace(head_norms(w, sizes), output_gate=OutputGate.WITH_QUERIES, indexer=indexer)
    attention = SelfAttention(w, sizes, index, cache, options)
    return TextLayer(_block(w, sizes, streams, attention), cache, rotary, beside=keys)


@dataclass(frozen=True, slots=True, eq=False)
class _NgramBlock:
    """Adds embeddings of n-grams to the streams before the block; see `LayerBlock`."""

    embedding: NgramEmbedding
    block: ConnectedBlock

    @property
    def row_elements(self) -> int:
        return max(self.embedding.row_elements, self.block.row_elements)

    @property
    def matrix_elements(self) -> int:
        return max(self.embedding.matrix_elements, self.block.matrix_elements)

    def __call__(self, x: Tensor, step: Step) -> Tensor:
        assert step.beside is not None, "the layer declares one cache"
        return self.block(self.embedding(x, step.beside), step)


def _block(
    w: TensorScope, sizes: TextSizes, streams: StreamSizes, mixer: GatedDeltaNet | SelfAttention
) -> ConnectedBlock:
    shared = sizes.metadata.require_size("expert_shared_feed_forward_length")
    options = ExpertOptions(
        routing=SOFTMAX_OF_CHOSEN, shared=SharedExpert(w, hidden=sizes.hidden, size=shared)
    )
    return ConnectedBlock(
        GatedConnection(w, "hc_attn", sizes, streams),
        mixer,
        GatedConnection(w, "hc_ffn", sizes, streams),
        Experts.read(w, sizes, options),
    )


def _layer_with_ngrams(metadata: Metadata, recurrent: tuple[bool, ...]) -> int | None:
    """The number of the layer that adds embeddings of n-grams, for which files have one table."""
    stated = metadata.get_array(_NGRAM_LAYERS, int) or ()
    if not stated:
        return None
    if len(stated) > 1 or not 0 <= stated[0] < len(recurrent) or not recurrent[stated[0]]:
        raise metadata.error(_NGRAM_LAYERS, f"is {list(stated)[:8]}, not one recurrent layer")
    return stated[0]
