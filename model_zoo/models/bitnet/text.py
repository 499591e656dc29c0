"""BitNet b1.58: Llama with norms before the last matrices of attention and feed-forward."""

from model_zoo.gguf.metadata import Metadata
from model_zoo.gguf.scope import TensorScope
from model_zoo.layers.attention import AttentionOptions
from model_zoo.layers.attention_layer import attention_layer
from model_zoo.layers.decoder import Decoder, TextLayer, uniform_decoder
from model_zoo.layers.feed_forward import GatedFeedForward
from model_zoo.layers.rope import Pairs, Rotary
from model_zoo.layers.text_sizes import TextSizes
from runtime.errors import UnsupportedModelError
from runtime.kernels.pointwise import relu_squared_mul, silu_mul

CURVE = "hidden_activation"
# Values of the key; files without it are of the first models.
GATES = {"silu": silu_mul, "relu2": relu_squared_mul}


def build_decoder(w: TensorScope, metadata: Metadata) -> Decoder:
    """The inputs of products are not rounded to 8 bits, as in training, but as for other models."""
    stated = metadata.get(CURVE, str, "silu")
    if stated not in GATES:
        raise UnsupportedModelError(
            f"{metadata.path}: `{metadata.full_key(CURVE)}` is {stated[:40]!r}; supported are "
            f"{' and '.join(GATES)}."
        )
    return uniform_decoder(w, TextSizes.read(metadata), Pairs.NEOX, _layer)


def _layer(w: TensorScope, sizes: TextSizes, index: int, rotary: Rotary) -> TextLayer:
    hidden, width = sizes.hidden, sizes.feed_forward[index]
    attended = sizes.heads[index] * sizes.value_dim
    norm = w.rms_norm("attn_sub_norm", sizes.eps, size=attended)
    feed_forward = GatedFeedForward(
        w,
        hidden=hidden,
        size=width,
        gated=GATES[sizes.metadata.get(CURVE, str, "silu")],
        norm=w.rms_norm("ffn_sub_norm", sizes.eps, size=width),
    )
    attention = AttentionOptions(output_norm=norm)
    return attention_layer(w, sizes, index, rotary, attention=attention, feed_forward=feed_forward)
