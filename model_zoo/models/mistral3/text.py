"""Mistral Small 3.1 and later, and Ministral 3: the text model."""

from model_zoo.gguf.metadata import Metadata
from model_zoo.gguf.scope import TensorScope
from model_zoo.layers.attention import AttentionOptions
from model_zoo.layers.attention_layer import attention_layer
from model_zoo.layers.decoder import Decoder
from model_zoo.layers.rope import Pairs
from model_zoo.layers.rope_scaling import read_rotary
from model_zoo.layers.temperature import Temperature
from model_zoo.layers.text_sizes import TextSizes

# Values of all Ministral 3 models, as in Ministral3Config of `transformers`.
ORIGINAL_CONTEXT = 16_384
TEMPERATURE_KEYS = ("attention.temperature_scale", "rope.scaling_beta")


def build_decoder(w: TensorScope, metadata: Metadata) -> Decoder:
    """Llama with a stated head size; Ministral 3 also has YaRN and a temperature.

    Whole heads are rotated; the number of rotated dimensions that some converters state is wrong.
    """
    sizes = TextSizes.read(metadata)
    rotary = read_rotary(
        w, sizes, Pairs.INTERLEAVED, dim=sizes.key_dim, original_context=ORIGINAL_CONTEXT
    )
    attention = AttentionOptions(temperature=_temperature(metadata))
    layers = [
        attention_layer(w.scope("blk", i), sizes, i, rotary, attention=attention)
        for i in range(sizes.layers)
    ]
    return Decoder(w, sizes, layers)


def _temperature(metadata: Metadata) -> Temperature | None:
    """The attention temperature, if the file has one under either spelling of the key."""
    stated = [key for key in TEMPERATURE_KEYS if metadata.get(key, float, 0.0)]
    if not stated:
        return None
    span = metadata.get_size("rope.scaling.original_context_length", ORIGINAL_CONTEXT)
    return Temperature(metadata.get_positive(stated[0]), span)
