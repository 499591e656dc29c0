"""Granite 3, dense and with experts: Llama with multipliers of embeddings, residuals and logits."""

from model_zoo.gguf.metadata import Metadata
from model_zoo.gguf.scope import TensorScope
from model_zoo.layers.attention import SelfAttention
from model_zoo.layers.block import RowWise, read_block
from model_zoo.layers.decoder import Decoder, Layer
from model_zoo.layers.experts import Experts, ExpertSizes
from model_zoo.layers.feed_forward import GatedFeedForward
from model_zoo.layers.rope import Pairs, Rotary
from model_zoo.layers.rope_scaling import read_rotary
from model_zoo.layers.sizes import Sizes
from runtime.kv.spec import Full


def build_decoder(w: TensorScope, metadata: Metadata) -> Decoder:
    """Rotary pairs are interleaved: converters have permuted the rows of attn_q and attn_k.

    Multipliers are 1 by default, as in GraniteConfig of `transformers`.
    """
    sizes = Sizes.read(metadata)
    rotary = read_rotary(
        w,
        metadata,
        pairs=Pairs.INTERLEAVED,
        key_dim=sizes.key_dim,
        base=metadata.get_positive("rope.freq_base"),
    )
    layers = [_layer(w.scope("blk", i), sizes, i, rotary) for i in range(sizes.layers)]
    return Decoder(
        w,
        sizes,
        layers,
        embedding_scale=metadata.get_positive("embedding_scale", 1.0),
        logit_divisor=metadata.get_positive("logit_scale", 1.0),
    )


def _layer(w: TensorScope, sizes: Sizes, index: int, rotary: Rotary) -> Layer:
    metadata, cache = sizes.metadata, sizes.cache(index, Full())
    attention = SelfAttention(
        w,
        hidden=sizes.hidden,
        heads=sizes.heads[index],
        cache=cache,
        scale=metadata.get_positive("attention.scale", 1.0),
    )
    block = read_block(
        w,
        sizes,
        attention,
        _feed_forward(w, sizes, index),
        residual_scale=metadata.get_positive("residual_scale", 1.0),
    )
    return Layer(block, cache, rotary)


def _feed_forward(w: TensorScope, sizes: Sizes, index: int) -> RowWise:
    if sizes.metadata.get("expert_count", int, 0) > 0:
        counts = ExpertSizes.read(sizes.metadata, width=sizes.feed_forward[index])
        return Experts(w, hidden=sizes.hidden, sizes=counts)
    return GatedFeedForward(w, hidden=sizes.hidden, size=sizes.feed_forward[index])
