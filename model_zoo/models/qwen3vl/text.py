"""Qwen 3-VL: the text model, dense or with experts."""

from model_zoo.gguf.metadata import Metadata
from model_zoo.gguf.scope import TensorScope
from model_zoo.layers.attention import head_norms
from model_zoo.layers.attention_layer import attention_layer
from model_zoo.layers.decoder import Decoder, TextLayer, uniform_decoder
from model_zoo.layers.experts import ExpertOptions, experts_or_dense
from model_zoo.layers.rope import Pairs, Rotary
from model_zoo.layers.routing import stated_softmax
from model_zoo.layers.text_sizes import TextSizes

# Values of all models, as in Qwen3VLTextConfig of `transformers`.
SECTIONS, EPS, DEFAULT_HEAD_DIM = (24, 20, 20), 1e-6, 128


def build_decoder(w: TensorScope, metadata: Metadata) -> Decoder:
    """Qwen 3 with rotation by time, row and column, interleaved.

    The features of intermediate vision layers are added to image rows after the first text layers.
    """
    sizes = TextSizes.read(metadata, eps=EPS, head_dim=DEFAULT_HEAD_DIM)
    return uniform_decoder(
        w, sizes, Pairs.NEOX, _layer, dim=sizes.key_dim, sections=SECTIONS, interleaved=True
    )


def _layer(w: TensorScope, sizes: TextSizes, index: int, rotary: Rotary) -> TextLayer:
    routing = ExpertOptions(routing=stated_softmax(sizes.metadata))
    return attention_layer(
        w,
        sizes,
        index,
        rotary,
        attention=head_norms(w, sizes),
        feed_forward=experts_or_dense(w, sizes, index, routing),
    )
