"""Gemma 3n: the text model."""

from functools import partial

from torch import Tensor

from model_zoo.gguf.metadata import Metadata
from model_zoo.gguf.scope import TensorScope
from model_zoo.layers.altup import AltUp, AltUpStreams
from model_zoo.layers.attention import AttentionOptions, SelfAttention
from model_zoo.layers.decoder import Decoder, DecoderOptions
from model_zoo.layers.feed_forward import GatedFeedForward
from model_zoo.layers.layer_inputs import LayerInputGate, TokenLayerInputs, layer_input_width
from model_zoo.layers.norm import RMSNorm
from model_zoo.layers.rope import Pairs, Rotary
from model_zoo.layers.rope_scaling import plain_frequencies, read_rotary
from model_zoo.layers.stack import TextLayer
from model_zoo.layers.step import Step
from model_zoo.layers.text_sizes import MAX_HEAD_DIM, TextSizes
from runtime.kernels.pointwise import add_, contiguous, gelu_mul, mul, scale_
from runtime.kernels.streams import add_to_others_, cut_low
from runtime.kv.cache_kinds import Full, Sliding
from runtime.kv.cache_layout import LayerCache

# Values of both models, as in Gemma3nTextConfig of `transformers`.
DEFAULT_EPS, DEFAULT_HEAD_DIM, DEFAULT_INPUT_WIDTH = 1e-6, 256, 256
FULL_EVERY = 5
LOCAL_BASE, GLOBAL_BASE = 10_000.0, 1_000_000.0
# Two spellings: Ollama's, and llama.cpp's.
LOCAL_KEYS = "rope.freq_base_local", "rope.freq_base_swa"
LOGIT_CAP = 30.0  # of all models; Ollama's files omit it
DEFAULT_STREAMS, MAX_STREAMS = 4, 64
SQUARE_HALF = 0.5**0.5


def build_decoder(w: TensorScope, metadata: Metadata) -> Decoder:
    """Four residual streams, one of which each layer computes, and per-layer inputs.

    The last layers use the keys and values of earlier ones. The norm weights in a file are those of
    the model.
    """
    head_dim = metadata.get_size("head_dim", DEFAULT_HEAD_DIM, at_most=MAX_HEAD_DIM)
    sizes = TextSizes.read(metadata, eps=DEFAULT_EPS, head_dim=head_dim)
    sliding = sizes.sliding_layers(FULL_EVERY)
    window = Sliding(metadata.require_size("attention.sliding_window"))
    global_rotary = _global_rotary(w, sizes)
    local_rotary = _local_rotary(global_rotary, metadata)
    layers = []
    for index, source in enumerate(sizes.cache_sources(sliding)):
        cache = sizes.cache(source, window if sliding[index] else Full())
        block = _Block(w.scope("blk", index), sizes, index, cache, stores=source == index)
        reads = None if source == index else source
        layers.append(
            TextLayer(block, cache, local_rotary if sliding[index] else global_rotary, reads)
        )
    options = DecoderOptions(
        embedding_scale=sizes.hidden**0.5,
        logit_softcap=sizes.cap("final_logit_softcapping", LOGIT_CAP),
        layer_inputs=TokenLayerInputs(w, sizes, width=_input_width(metadata)),
        streams=AltUpStreams(w, sizes, streams=_streams(sizes)),
    )
    return Decoder(w, sizes, layers, options)


class _Block:
    """Predicts the streams, computes the active one, corrects all, and adds the per-layer input."""

    def __init__(
        self, w: TensorScope, sizes: TextSizes, index: int, cache: LayerCache, *, stores: bool
    ) -> None:
        metadata, hidden, streams = sizes.metadata, sizes.hidden, _streams(sizes)
        self._active = _active_stream(metadata, streams)
        norm = partial(w.rms_norm, eps=sizes.eps, size=hidden)
        self._altup = AltUp(w, sizes, streams=streams, active=self._active)
        self._attn_norm, self._post_attention_norm = norm("attn_norm"), norm("post_attention_norm")
        self._attention = _attention(w, sizes, index, cache, stores=stores)
        self._laurel = _Laurel(w, sizes)
        self._ffn_norm, self._post_ffw_norm = norm("ffn_norm"), norm("post_ffw_norm")
        self._feed_forward = _feed_forward(w, sizes, index)
        self._scale = _correct_scale(w, sizes)
        self._gate = LayerInputGate(w, sizes, width=_input_width(metadata))
        parts = self._attention, self._laurel, self._feed_forward, self._gate
        self.row_elements = 3 * streams * hidden + max(part.row_elements for part in parts)
        self.matrix_elements = max(hidden**2, *(part.matrix_elements for part in parts))

    def __call__(self, x: Tensor, step: Step) -> Tensor:
        """x [tokens, streams, hidden] -> the same shape, or [outputs, streams, hidden] if
        `step.rows` selects rows."""
        x = self._altup.predicted(x)
        normal = self._attn_norm(x[:, self._active])
        attended = self._post_attention_norm(self._attention(normal, step))
        normal = step.kept(normal)
        x = step.kept(x.flatten(1)).unflatten(1, x.shape[1:])
        attended = add_(add_(attended, x[:, self._active]), self._laurel(normal))
        active = scale_(attended, SQUARE_HALF)
        added = self._post_ffw_norm(self._feed_forward(self._ffn_norm(active)))
        x = self._altup.corrected(x, add_(added, active))
        assert step.layer_input is not None
        first, scale = x[:, self._active], self._scale
        first = contiguous(first) if scale is None else mul(first, scale.expand_as(first))
        return add_to_others_(x, self._gate(first, step.kept(step.layer_input)))


class _Laurel:
    """x + norm(right(left(x))); the product of the two matrices has a low rank."""

    def __init__(self, w: TensorScope, sizes: TextSizes) -> None:
        self._left = w.linear("laurel_l", shape=(None, sizes.hidden))
        rank = self._left.weight.shape[0]
        self._right = w.linear("laurel_r", shape=(sizes.hidden, rank or None))
        self._norm = w.rms_norm("laurel_post_norm", sizes.eps, size=sizes.hidden)
        self.row_elements = 3 * rank + 4 * sizes.hidden
        self.matrix_elements = rank * sizes.hidden

    def __call__(self, x: Tensor) -> Tensor:
        """x [tokens, hidden] -> a new [tokens, hidden]."""
        return add_(self._norm(self._right(self._left(x))), x)


def _global_rotary(w: TensorScope, sizes: TextSizes) -> Rotary:
    return read_rotary(w, sizes, Pairs.NEOX, default_base=GLOBAL_BASE)


def _local_rotary(global_rotary: Rotary, metadata: Metadata) -> Rotary:
    """The embedding of layers with a window: the same dimensions, another base, no scaling."""
    ollama, llama_cpp = LOCAL_KEYS
    base = metadata.get_positive(ollama if metadata.has(ollama) else llama_cpp, LOCAL_BASE)
    frequencies = plain_frequencies(2 * global_rotary.frequencies.shape[0], base)
    return Rotary(frequencies.to(global_rotary.frequencies.device), Pairs.NEOX)


def _attention(
    w: TensorScope, sizes: TextSizes, index: int, cache: LayerCache, *, stores: bool
) -> SelfAttention:
    if not stores:  # converters may keep the unused tensors
        w.ignore("attn_k", "attn_v", "attn_k_norm")
    norm = partial(w.rms_norm, eps=sizes.eps, size=sizes.key_dim)
    options = AttentionOptions(
        scale=1.0,
        q_norm=norm("attn_q_norm"),
        k_norm=norm("attn_k_norm") if stores else None,
        v_norm=RMSNorm(None, sizes.eps),
        stores=stores,
    )
    return SelfAttention(w, sizes, index, cache, options)


def _feed_forward(w: TensorScope, sizes: TextSizes, index: int) -> GatedFeedForward:
    """In the first layers, gates below a bound relative to their row are zero."""
    metadata, key = sizes.metadata, "activation_sparsity_scale"
    bounds = metadata.require_array(key, float, infinite=True)
    if len(bounds) != sizes.layers:
        raise metadata.error(key, f"has {len(bounds):,} entries for {sizes.layers:,} layers")
    gated = partial(_sparse_gelu_mul, bound=bounds[index]) if bounds[index] > 0 else gelu_mul
    size = sizes.feed_forward[index]
    return GatedFeedForward(w, hidden=sizes.hidden, size=size, gated=gated)


def _sparse_gelu_mul(gate: Tensor, up: Tensor, *, bound: float) -> Tensor:
    """gelu(relu(gate - mean - bound * deviation)) * up; mean and deviation are those of the row.
    The result has gate's type."""
    return gelu_mul(cut_low(gate, bound=bound), up)


def _correct_scale(w: TensorScope, sizes: TextSizes) -> Tensor | None:
    """The factor of the active stream at the input of the per-layer gate."""
    if sizes.metadata.get("altup.correct_scale", bool, True):
        return w.vector("altup_correct_scale", size=sizes.hidden)
    w.ignore("altup_correct_scale")
    return None


def _streams(sizes: TextSizes) -> int:
    return sizes.metadata.get_size("altup.num_inputs", DEFAULT_STREAMS, at_most=MAX_STREAMS)


def _active_stream(metadata: Metadata, streams: int) -> int:
    active = metadata.get("altup.active_idx", int, 0)
    if not 0 <= active < streams:
        raise metadata.error("altup.active_idx", f"is {active}; there are {streams} streams")
    return active


def _input_width(metadata: Metadata) -> int:
    return layer_input_width(metadata) or DEFAULT_INPUT_WIDTH
