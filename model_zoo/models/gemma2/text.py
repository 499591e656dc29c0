"""Gemma 2."""

from model_zoo.gguf.metadata import Metadata
from model_zoo.gguf.scope import TensorScope
from model_zoo.layers.attention import SelfAttention
from model_zoo.layers.block import read_block
from model_zoo.layers.decoder import Decoder, Layer
from model_zoo.layers.feed_forward import GatedFeedForward
from model_zoo.layers.rope import Pairs, Rotary
from model_zoo.layers.rope_scaling import read_rotary
from model_zoo.layers.sizes import Sizes
from runtime.kernels.pointwise import gelu_mul
from runtime.kv.spec import Full, LayerCache, Sliding

# The values of all checkpoints, as in Gemma2Config of `transformers`. llama.cpp's converter omitted
# window and caps at first; its loader has the same defaults.
DEFAULT_WINDOW, ATTENTION_CAP, LOGIT_CAP = 4096, 50.0, 30.0
DEFAULT_HEAD_DIM, LARGEST_HEAD_DIM = 256, 128
LARGEST = 46  # layers of the 27B model, which scales its queries by other sizes


def build_decoder(w: TensorScope, metadata: Metadata) -> Decoder:
    """Even layers see a window. The norms' weights in a file are those of the model plus one."""
    largest = metadata.get("block_count", int) == LARGEST
    sizes = Sizes.read(metadata, head_dim=LARGEST_HEAD_DIM if largest else DEFAULT_HEAD_DIM)
    window = Sliding(metadata.get_size("attention.sliding_window", DEFAULT_WINDOW))
    rotary = read_rotary(w, metadata, pairs=Pairs.NEOX, key_dim=sizes.key_dim)
    caches = [sizes.cache(i, Full() if i % 2 else window) for i in range(sizes.layers)]
    layers = [_layer(w.scope("blk", i), sizes, i, cache, rotary) for i, cache in enumerate(caches)]
    return Decoder(
        w,
        sizes,
        layers,
        embedding_scale=sizes.hidden**0.5,
        logit_softcap=sizes.cap("final_logit_softcapping", LOGIT_CAP),
    )


def _layer(w: TensorScope, sizes: Sizes, index: int, cache: LayerCache, rotary: Rotary) -> Layer:
    heads = sizes.heads[index]
    scaled_by = sizes.hidden // heads if sizes.layers == LARGEST else sizes.key_dim
    attention = SelfAttention(
        w,
        hidden=sizes.hidden,
        heads=heads,
        cache=cache,
        scale=scaled_by**-0.5,
        softcap=sizes.cap("attn_logit_softcapping", ATTENTION_CAP),
    )
    size = sizes.feed_forward[index]
    feed_forward = GatedFeedForward(w, hidden=sizes.hidden, size=size, gated=gelu_mul)
    return Layer(read_block(w, sizes, attention, feed_forward, post_norms=True), cache, rotary)
