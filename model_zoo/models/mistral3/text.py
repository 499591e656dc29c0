"""Mistral Small 3.1 and later, and Ministral 3: the text part."""

from model_zoo.gguf.metadata import Metadata
from model_zoo.gguf.scope import TensorScope
from model_zoo.layers.attention import SelfAttention, Temperature
from model_zoo.layers.block import Block, read_block
from model_zoo.layers.decoder import Decoder, Layer
from model_zoo.layers.feed_forward import GatedFeedForward
from model_zoo.layers.rope import Pairs
from model_zoo.layers.rope_scaling import read_rotary
from model_zoo.layers.sizes import Sizes
from runtime.kv.spec import Full, LayerCache

# Of all Ministral 3 models, as in Ministral3Config of `transformers`.
ORIGINAL_CONTEXT = 16_384
TEMPERATURE_KEYS = ("attention.temperature_scale", "rope.scaling_beta")


def build_decoder(w: TensorScope, metadata: Metadata) -> Decoder:
    """As llama, with heads of their own size; Ministral 3 also has YaRN and a temperature.

    Some converters state the number of rotated dimensions by accident, so heads turn whole.
    """
    sizes = Sizes.read(metadata)
    rotary = read_rotary(
        w,
        metadata,
        pairs=Pairs.INTERLEAVED,
        key_dim=sizes.key_dim,
        dim=sizes.key_dim,
        base=metadata.get_positive("rope.freq_base"),
        original_context=ORIGINAL_CONTEXT,
    )
    temperature = _temperature(metadata)
    layers = []
    for index in range(sizes.layers):
        cache = sizes.cache(index, Full())
        block = _block(w.scope("blk", index), sizes, index, cache, temperature)
        layers.append(Layer(block, cache, rotary))
    return Decoder(w, sizes, layers)


def _block(
    w: TensorScope, sizes: Sizes, index: int, cache: LayerCache, temperature: Temperature | None
) -> Block:
    attention = SelfAttention(
        w,
        hidden=sizes.hidden,
        heads=sizes.heads[index],
        cache=cache,
        scale=sizes.key_dim**-0.5,
        temperature=temperature,
    )
    feed_forward = GatedFeedForward(w, hidden=sizes.hidden, size=sizes.feed_forward[index])
    return read_block(w, sizes, attention, feed_forward)


def _temperature(metadata: Metadata) -> Temperature | None:
    """Where the file has one, in either spelling."""
    stated = [key for key in TEMPERATURE_KEYS if metadata.get(key, float, 0.0)]
    if not stated:
        return None
    span = metadata.get_size("rope.scaling.original_context_length", ORIGINAL_CONTEXT)
    return Temperature(metadata.get_positive(stated[0]), span)
