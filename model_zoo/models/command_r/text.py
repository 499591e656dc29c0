"""Command-R, Command-R+ and Command R7B: attention and feed-forward in parallel after one norm
without bias."""

from model_zoo.gguf.metadata import Metadata
from model_zoo.gguf.scope import TensorScope
from model_zoo.layers.attention import head_layer_norms
from model_zoo.layers.attention_layer import Attended, alternating_layers, attention_layer
from model_zoo.layers.block import ParallelOptions
from model_zoo.layers.decoder import Decoder, DecoderOptions, TextLayer
from model_zoo.layers.rope import Pairs, Rotary
from model_zoo.layers.rope_scaling import read_rotary
from model_zoo.layers.text_sizes import TextSizes
from runtime.kv.spec import CacheKind, Full, Sliding

# As in CohereConfig of `transformers`.
DEFAULT_EPS, DEFAULT_LOGIT_SCALE = 1e-5, 0.0625
WINDOWED, FULL_EVERY = "cohere2", 4  # the architecture of Command R7B


def build_decoder(w: TensorScope, metadata: Metadata) -> Decoder:
    """Rotary pairs are interleaved in the authors' checkpoints. The head is the embedding.

    Command-R+ norms the queries and keys of each head. In Command R7B, every fourth layer attends
    to all tokens, without rotation; the others have a window.
    """
    eps = metadata.get_positive("attention.layer_norm_epsilon", DEFAULT_EPS)
    sizes = TextSizes.read(metadata, eps=eps)
    rotary = read_rotary(w, sizes, Pairs.INTERLEAVED)
    near: Attended = Full(), rotary
    far = near
    if metadata.architecture == WINDOWED:
        near = Sliding(metadata.require_size("attention.sliding_window")), rotary
        far = Full(), None
    slides = sizes.sliding_layers(FULL_EVERY)
    layers = alternating_layers(w, sizes, slides, _layer, near=near, far=far)
    options = DecoderOptions(
        logit_scale=metadata.get_positive("logit_scale", DEFAULT_LOGIT_SCALE),
        output_norm=w.layer_norm("output_norm", eps, size=sizes.hidden),
    )
    return Decoder(w, sizes, layers, options)


def _layer(
    w: TensorScope, sizes: TextSizes, index: int, kind: CacheKind, rotary: Rotary | None
) -> TextLayer:
    attention = head_layer_norms(w, sizes, index)
    block = ParallelOptions()
    return attention_layer(w, sizes, index, rotary, kind=kind, attention=attention, block=block)
