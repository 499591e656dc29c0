"""EmbeddingGemma: Gemma 3 with attention in both directions, for embeddings of texts."""

from model_zoo.gguf.metadata import Metadata
from model_zoo.gguf.scope import TensorScope
from model_zoo.layers.attention import head_norms
from model_zoo.layers.attention_layer import attention_layer
from model_zoo.layers.block import BlockOptions
from model_zoo.layers.feed_forward import GatedFeedForward
from model_zoo.layers.rope import Pairs, Rotary
from model_zoo.layers.rope_scaling import plain_frequencies, read_rotary
from model_zoo.layers.stack import TextLayer
from model_zoo.layers.text_encoder import EncoderOptions, TextEncoder
from model_zoo.layers.text_sizes import TextSizes
from runtime.kernels.pointwise import gelu_mul
from runtime.kv.spec import CacheKind, Full, Symmetric

FULL_EVERY = 6
# As in llama.cpp, whose converter omitted the key at first.
LOCAL_BASE = 10_000.0


def build_decoder(w: TensorScope, metadata: Metadata) -> TextEncoder:
    """All layers but every sixth have a window, half of it on each side, and another rotary base.

    The norm weights in a file are those of the model plus one.
    """
    sizes = TextSizes.read(metadata)
    window = Symmetric(metadata.require_size("attention.sliding_window") // 2)
    near_base = metadata.get_positive("rope.freq_base_swa", LOCAL_BASE)
    near = Rotary(plain_frequencies(sizes.key_dim, near_base).to(w.device), Pairs.NEOX)
    base = metadata.get_positive("rope.freq_base")
    far = read_rotary(w, metadata, pairs=Pairs.NEOX, key_dim=sizes.key_dim, base=base)
    layers = [
        _layer(w.scope("blk", i), sizes, i, *((window, near) if slides else (Full(), far)))
        for i, slides in enumerate(sizes.sliding_layers(FULL_EVERY))
    ]
    options = EncoderOptions(
        embedding_scale=sizes.hidden**0.5,
        output_norm=w.rms_norm("output_norm", sizes.eps, size=sizes.hidden),
    )
    return TextEncoder(w, sizes, layers, options)


def _layer(
    w: TensorScope, sizes: TextSizes, index: int, kind: CacheKind, rotary: Rotary
) -> TextLayer:
    size = sizes.feed_forward[index]
    return attention_layer(
        w,
        sizes,
        index,
        rotary,
        kind=kind,
        attention=head_norms(w, sizes),
        feed_forward=GatedFeedForward(w, hidden=sizes.hidden, size=size, gated=gelu_mul),
        block=BlockOptions(post_norms=True),
    )
