"""Gemma 2."""

from model_zoo.gguf.metadata import Metadata
from model_zoo.gguf.scope import TensorScope
from model_zoo.layers.attention import AttentionOptions
from model_zoo.layers.attention_layer import attention_layer
from model_zoo.layers.block import BlockOptions
from model_zoo.layers.decoder import Decoder, DecoderOptions, TextLayer
from model_zoo.layers.feed_forward import GatedFeedForward
from model_zoo.layers.rope import Pairs, Rotary
from model_zoo.layers.rope_scaling import DEFAULT_BASE, read_rotary
from model_zoo.layers.text_sizes import TextSizes
from runtime.kernels.pointwise import gelu_mul
from runtime.kv.cache_kinds import CacheKind, Full, Sliding

# Values of all checkpoints, as in Gemma2Config of `transformers`. llama.cpp's converter omitted
# window and caps at first; its loader has the same defaults.
DEFAULT_WINDOW, ATTENTION_CAP, LOGIT_CAP = 4096, 50.0, 30.0
DEFAULT_HEAD_DIM, LARGEST_HEAD_DIM = 256, 128
LARGEST = 46  # layers of the 27B model, whose scale is hidden / heads


def build_decoder(w: TensorScope, metadata: Metadata) -> Decoder:
    """Even layers have a window. The norm weights in a file are those of the model plus one."""
    largest = metadata.get("block_count", int) == LARGEST
    sizes = TextSizes.read(metadata, head_dim=LARGEST_HEAD_DIM if largest else DEFAULT_HEAD_DIM)
    window = Sliding(metadata.get_size("attention.sliding_window", DEFAULT_WINDOW))
    rotary = read_rotary(w, sizes, Pairs.NEOX, default_base=DEFAULT_BASE)
    kinds = [Full() if i % 2 else window for i in range(sizes.layers)]
    layers = [_layer(w.scope("blk", i), sizes, i, kind, rotary) for i, kind in enumerate(kinds)]
    options = DecoderOptions(
        embedding_scale=sizes.hidden**0.5,
        logit_softcap=sizes.cap("final_logit_softcapping", LOGIT_CAP),
    )
    return Decoder(w, sizes, layers, options)


def _layer(
    w: TensorScope, sizes: TextSizes, index: int, kind: CacheKind, rotary: Rotary
) -> TextLayer:
    heads, size = sizes.heads[index], sizes.feed_forward[index]
    scaled_by = sizes.hidden // heads if sizes.layers == LARGEST else sizes.key_dim
    return attention_layer(
        w,
        sizes,
        index,
        rotary,
        kind=kind,
        attention=AttentionOptions(
            scale=scaled_by**-0.5, softcap=sizes.cap("attn_logit_softcapping", ATTENTION_CAP)
        ),
        feed_forward=GatedFeedForward(w, hidden=sizes.hidden, size=size, gated=gelu_mul),
        block=BlockOptions(post_norms=True),
    )
