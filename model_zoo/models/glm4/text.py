"""GLM-4 0414, and the text models of GLM-4.1V and GLM-OCR: norms before and after attention and
feed-forward; half of each head or all of it is rotated."""

from model_zoo.gguf.metadata import Metadata
from model_zoo.gguf.scope import TensorScope
from model_zoo.layers.attention_layer import attention_layer
from model_zoo.layers.block import BlockOptions
from model_zoo.layers.decoder import Decoder, TextLayer, uniform_decoder
from model_zoo.layers.draft_layers import without_draft_layers
from model_zoo.layers.feed_forward import GatedFeedForward
from model_zoo.layers.rope import Pairs, Rotary
from model_zoo.layers.rope_sections import stated_sections
from model_zoo.layers.text_sizes import TextSizes


def build_decoder(w: TensorScope, metadata: Metadata) -> Decoder:
    """`rope.dimension_count` states how much of a head is rotated.

    Rotary pairs are interleaved, except in files of vision models, which llama.cpp's converter
    identifies by sections of time, rows and columns (M-RoPE): it permutes the rows of their queries
    and keys.
    """
    sizes = without_draft_layers(w, TextSizes.read(metadata))
    sections = stated_sections(metadata)
    pairs = Pairs.NEOX if sections else Pairs.INTERLEAVED
    return uniform_decoder(w, sizes, pairs, _layer, sections=sections)


def _layer(w: TensorScope, sizes: TextSizes, index: int, rotary: Rotary) -> TextLayer:
    size = sizes.feed_forward[index]
    return attention_layer(
        w,
        sizes,
        index,
        rotary,
        feed_forward=GatedFeedForward(w, hidden=sizes.hidden, size=size, whole="ffn_up"),
        block=BlockOptions(post_norms=True),
    )
