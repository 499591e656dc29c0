"""DeepSeek-OCR's text model: Llama's attention, experts and shared ones; leading layers are
dense."""

from model_zoo.gguf.metadata import Metadata
from model_zoo.gguf.scope import TensorScope
from model_zoo.layers.attention_layer import attention_layer
from model_zoo.layers.decoder import Decoder, TextLayer, uniform_decoder
from model_zoo.layers.leading_dense import SOFTMAX, leading_dense_or_experts
from model_zoo.layers.rope import Pairs, Rotary
from model_zoo.layers.rope_scaling import DEFAULT_BASE
from model_zoo.layers.text_sizes import TextSizes
from runtime.errors import UnsupportedModelError

EPS = 1e-6  # of files of Ollama, which state none
WINDOW_KEY = "attention.sliding_window"


def build_decoder(w: TensorScope, metadata: Metadata) -> Decoder:
    """All dimensions of a head are rotated; llama.cpp's converter states that none are."""
    if metadata.get(WINDOW_KEY, int, 0):
        raise UnsupportedModelError(
            f"{metadata.path}: tokens of an answer attend to few of those before them "
            f"(`{metadata.full_key(WINDOW_KEY)}`), as in Unlimited-OCR, which is not supported."
        )
    sizes = TextSizes.read(metadata, eps=EPS)
    return uniform_decoder(
        w, sizes, Pairs.NEOX, _layer, dim=sizes.key_dim, default_base=DEFAULT_BASE
    )


def _layer(w: TensorScope, sizes: TextSizes, index: int, rotary: Rotary) -> TextLayer:
    """Files of Ollama do not state how many experts are shared."""
    width = (w.shape("ffn_up_shexp") or (0,))[0]
    feed_forward = leading_dense_or_experts(w, sizes, index, scores=SOFTMAX, shared_width=width)
    return attention_layer(w, sizes, index, rotary, feed_forward=feed_forward)
