"""RWKV 7: recurrent layers without attention, with layer norms."""

from dataclasses import replace

from model_zoo.gguf.metadata import Metadata
from model_zoo.gguf.scope import TensorScope
from model_zoo.layers.decoder import Decoder, TextLayer, biased_output_norm
from model_zoo.layers.rwkv7 import FirstValues, RWKVBlock, RWKVSizes
from model_zoo.layers.text_sizes import MAX_HEAD_DIM, TextSizes

RANKS = ("decay", "iclr", "value_residual_mix", "gate")


def build_decoder(w: TensorScope, metadata: Metadata) -> Decoder:
    eps = metadata.get_positive("attention.layer_norm_epsilon")
    sizes = TextSizes.read(metadata, eps=eps, attends=False)
    recurrent = _recurrent_sizes(sizes)
    layers = []
    for index in range(sizes.layers):
        block = RWKVBlock(
            w.scope("blk", index),
            recurrent,
            number=index,
            inner=sizes.feed_forward[index],
            eps=eps,
        )
        layers.append(TextLayer(block, recurrent.cache, beside=recurrent.shifted))
    w.need_biases("token_embd_norm")
    norm = w.layer_norm("token_embd_norm", eps, size=sizes.hidden)
    options = biased_output_norm(w, sizes)
    options = replace(options, embedding_norm=norm, streams=FirstValues())
    return Decoder(w, sizes, layers, options)


def _recurrent_sizes(sizes: TextSizes) -> RWKVSizes:
    metadata, hidden = sizes.metadata, sizes.hidden
    head = metadata.require_size("wkv.head_size", at_most=MAX_HEAD_DIM)
    if hidden % head:
        raise metadata.error("wkv.head_size", f"is {head}, which does not divide {hidden:,}")
    ranks = (metadata.require_size(f"attention.{name}_lora_rank", at_most=hidden) for name in RANKS)
    return RWKVSizes(hidden, head, *ranks)
