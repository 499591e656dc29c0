"""Command-R, Command-R+, Command R7B and Cohere's models with experts: attention and feed-forward
in parallel after one norm without bias."""

from model_zoo.gguf.metadata import Metadata
from model_zoo.gguf.scope import TensorScope
from model_zoo.layers.attention import head_layer_norms
from model_zoo.layers.attention_layer import Attended, alternating_layers, attention_layer
from model_zoo.layers.block import ParallelOptions
from model_zoo.layers.decoder import Decoder, DecoderOptions, TextLayer
from model_zoo.layers.draft_layers import without_draft_layers
from model_zoo.layers.leading_dense import SIGMOID, leading_dense_or_experts
from model_zoo.layers.rope import Pairs, Rotary
from model_zoo.layers.rope_scaling import read_rotary
from model_zoo.layers.text_sizes import TextSizes
from runtime.kv.cache_kinds import CacheKind, Full, Sliding

# As in CohereConfig of `transformers`.
DEFAULT_EPS, DEFAULT_LOGIT_SCALE = 1e-5, 0.0625
WINDOWED, FULL_EVERY = "cohere2", 4  # the architecture of Command R7B
WITH_EXPERTS = "cohere2moe"
LAYER_EPS, RMS_EPS = "attention.layer_norm_epsilon", "attention.layer_norm_rms_epsilon"


def build_decoder(w: TensorScope, metadata: Metadata) -> Decoder:
    """Rotary pairs are interleaved in the authors' checkpoints. The head is the embedding.

    Command-R+ norms the queries and keys of each head. In Command R7B, every fourth layer attends
    to all tokens, without rotation; the others have a window.
    """
    if metadata.architecture == WITH_EXPERTS:
        return _with_experts(w, metadata)
    eps = metadata.get_positive(LAYER_EPS, DEFAULT_EPS)
    sizes = TextSizes.read(metadata, eps=eps)
    rotary = read_rotary(w, sizes, Pairs.INTERLEAVED)
    near: Attended = Full(), rotary
    far = near
    if metadata.architecture == WINDOWED:
        near = Sliding(metadata.require_size("attention.sliding_window")), rotary
        far = Full(), None
    slides = sizes.sliding_layers(FULL_EVERY)
    layers = alternating_layers(w, sizes, slides, _layer, near=near, far=far)
    return Decoder(w, sizes, layers, _options(w, sizes))


def _options(w: TensorScope, sizes: TextSizes) -> DecoderOptions:
    """Files with experts may state that norms are RMS norms."""
    metadata, norm = sizes.metadata, None
    if not (metadata.architecture == WITH_EXPERTS and metadata.has(RMS_EPS)):
        norm = w.layer_norm("output_norm", sizes.eps, size=sizes.hidden)
    scale = metadata.get_positive("logit_scale", DEFAULT_LOGIT_SCALE)
    return DecoderOptions(logit_scale=scale, output_norm=norm)


def _layer(
    w: TensorScope, sizes: TextSizes, index: int, kind: CacheKind, rotary: Rotary | None
) -> TextLayer:
    attention = head_layer_norms(w, sizes, index)
    block = ParallelOptions()
    return attention_layer(w, sizes, index, rotary, kind=kind, attention=attention, block=block)


def _with_experts(w: TensorScope, metadata: Metadata) -> Decoder:
    """Leading layers are dense and rotated; of the others, those that attend to all tokens, as the
    file lists them, are not rotated. Experts and the shared one are averaged."""
    sizes = TextSizes.read(metadata, eps=metadata.get(LAYER_EPS, float))
    sizes = without_draft_layers(w, sizes)
    rotary = read_rotary(w, sizes, Pairs.INTERLEAVED)
    window = Sliding(metadata.require_size("attention.sliding_window"))
    dense = metadata.get("leading_dense_block_count", int, 0)
    metadata.require_array("attention.sliding_window_pattern", bool)
    layers = [
        attention_layer(
            scope := w.scope("blk", i),
            sizes,
            i,
            rotary if slides or i < dense else None,
            kind=window if slides else Full(),
            feed_forward=leading_dense_or_experts(scope, sizes, i, scores=SIGMOID, averaged=True),
            block=ParallelOptions(rms=metadata.has(RMS_EPS)),
        )
        for i, slides in enumerate(sizes.sliding_layers(0))
    ]
    return Decoder(w, sizes, layers, _options(w, sizes))
