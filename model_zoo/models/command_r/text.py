"""Command-R, Command-R+ and Command R7B: attention and feed-forward in parallel after one norm
without bias."""

from model_zoo.gguf.metadata import Metadata
from model_zoo.gguf.scope import TensorScope
from model_zoo.layers.attention import head_layer_norms
from model_zoo.layers.attention_layer import parallel_layer
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
    kinds: list[tuple[CacheKind, Rotary | None]] = [(Full(), rotary)] * sizes.layers
    if metadata.architecture == WINDOWED:
        window = Sliding(metadata.require_size("attention.sliding_window"))
        sliding = sizes.sliding_layers(FULL_EVERY)
        kinds = [(window, rotary) if slides else (Full(), None) for slides in sliding]
    layers = [_layer(w.scope("blk", i), sizes, i, *kind) for i, kind in enumerate(kinds)]
    options = DecoderOptions(
        logit_scale=metadata.get_positive("logit_scale", DEFAULT_LOGIT_SCALE),
        output_norm=w.layer_norm("output_norm", eps, size=sizes.hidden),
    )
    return Decoder(w, sizes, layers, options)


def _layer(
    w: TensorScope, sizes: TextSizes, index: int, kind: CacheKind, rotary: Rotary | None
) -> TextLayer:
    attention = head_layer_norms(w, sizes, index)
    return parallel_layer(w, sizes, index, rotary, kind=kind, attention=attention)
