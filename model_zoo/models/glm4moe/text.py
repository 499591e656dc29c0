"""GLM-4.5 and later, the text model of GLM-4.5V, and Solar Open: leading dense layers, then
experts; in GLM, a part of each head is rotated."""

from model_zoo.gguf.metadata import Metadata
from model_zoo.gguf.scope import TensorScope
from model_zoo.layers.attention import head_norms
from model_zoo.layers.attention_layer import attention_layer
from model_zoo.layers.block import BlockOptions
from model_zoo.layers.decoder import Decoder, TextLayer, uniform_decoder
from model_zoo.layers.draft_layers import without_draft_layers
from model_zoo.layers.leading_dense import SIGMOID, leading_dense_or_experts
from model_zoo.layers.rope import Pairs, Rotary
from model_zoo.layers.rope_sections import stated_sections
from model_zoo.layers.text_sizes import TextSizes


def build_decoder(w: TensorScope, metadata: Metadata) -> Decoder:
    """`rope.dimension_count` states how much of a head is rotated, in files of vision models by
    sections of time, rows and columns. Files name the norm before the feed-forward
    `post_attention_norm`; those of some models have norms of queries and keys."""
    sizes = without_draft_layers(w, TextSizes.read(metadata))
    return uniform_decoder(w, sizes, Pairs.NEOX, _layer, sections=stated_sections(metadata))


def _layer(w: TensorScope, sizes: TextSizes, index: int, rotary: Rotary) -> TextLayer:
    return attention_layer(
        w,
        sizes,
        index,
        rotary,
        attention=head_norms(w, sizes) if w.has("attn_q_norm") else None,
        feed_forward=leading_dense_or_experts(w, sizes, index, scores=SIGMOID),
        block=BlockOptions(ffn_norm="post_attention_norm"),
    )
