"""Gemma 3n, the text model."""

from functools import partial

import torch
from torch import Tensor

from model_zoo.gguf.metadata import Metadata
from model_zoo.gguf.scope import TensorScope
from model_zoo.layers.altup import AltUp, Gathered, Spread
from model_zoo.layers.attention import SelfAttention
from model_zoo.layers.decoder import Decoder
from model_zoo.layers.feed_forward import GatedFeedForward
from model_zoo.layers.layer_inputs import LayerInputGate, TokenLayerInputs, layer_input_width
from model_zoo.layers.norm import RMSNorm
from model_zoo.layers.rope import Pairs, Rotary
from model_zoo.layers.rope_scaling import plain_frequencies, read_rotary
from model_zoo.layers.sizes import MAX_HEAD_DIM, Sizes
from model_zoo.layers.stack import Layer
from model_zoo.layers.step import Step
from runtime.kernels.pointwise import gelu_mul
from runtime.kv.spec import Full, LayerCache, Sliding

# The values of both models, as in Gemma3nTextConfig of `transformers`.
DEFAULT_EPS, DEFAULT_HEAD_DIM, DEFAULT_INPUT_WIDTH = 1e-6, 256, 256
FULL_EVERY = 5
LOCAL_BASE, GLOBAL_BASE = 10_000.0, 1_000_000.0
# Two spellings: Ollama's, and llama.cpp's.
LOCAL_KEYS = "rope.freq_base_local", "rope.freq_base_swa"
LOGIT_CAP = 30.0  # that of all models; Ollama's files do not state it
DEFAULT_STREAMS, MAX_STREAMS = 4, 64
SQUARE_HALF = 0.5**0.5


def build_decoder(w: TensorScope, metadata: Metadata) -> Decoder:
    """Four streams of residuals, of which each layer computes one; inputs for each layer.

    The last layers use the keys and values of earlier ones. The norms' weights in a file are those
    of the model.
    """
    head_dim = metadata.get_size("head_dim", DEFAULT_HEAD_DIM, at_most=MAX_HEAD_DIM)
    sizes = Sizes.read(metadata, eps=DEFAULT_EPS, head_dim=head_dim)
    sliding = sizes.sliding_layers(FULL_EVERY)
    window = Sliding(metadata.require_size("attention.sliding_window"))
    far = _far(w, sizes)
    near = _near(far, metadata)
    layers = []
    for index, source in enumerate(sizes.cache_sources(sliding)):
        cache = sizes.cache(source, window if sliding[index] else Full())
        block = _Block(w, sizes, index, cache, stores=source == index)
        reads = None if source == index else source
        layers.append(Layer(block, cache, near if sliding[index] else far, reads))
    return Decoder(
        w,
        sizes,
        layers,
        embedding_scale=sizes.hidden**0.5,
        logit_softcap=sizes.cap("final_logit_softcapping", LOGIT_CAP),
        layer_inputs=TokenLayerInputs(w, sizes, width=_input_width(metadata)),
    )


class _Block:
    """A layer: streams predicted, the active one computed, all corrected, its input added.

    The first spreads the embeddings to streams, and the last gathers these.
    """

    def __init__(
        self, w: TensorScope, sizes: Sizes, index: int, cache: LayerCache, *, stores: bool
    ) -> None:
        metadata, hidden = sizes.metadata, sizes.hidden
        streams = metadata.get_size("altup.num_inputs", DEFAULT_STREAMS, at_most=MAX_STREAMS)
        self._active = _active_stream(metadata, streams)
        last = index == sizes.layers - 1
        self._broadcast = Spread(w, sizes, streams=streams) if index == 0 else None
        self._all_gather = Gathered(w, sizes, streams=streams) if last else None
        w = w.scope("blk", index)
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
        """x [tokens, streams, hidden], of the first layer [tokens, hidden] -> the same, of
        `step.rows` alone where given; of the last layer [outputs, hidden].
        """
        x = self._altup.predicted(x if self._broadcast is None else self._broadcast(x))
        normal = self._attn_norm(x[:, self._active])
        attended = self._post_attention_norm(self._attention(normal, step))
        x, normal = step.kept(x), step.kept(normal)
        active = attended.add_(x[:, self._active]).add_(self._laurel(normal)).mul_(SQUARE_HALF)
        added = self._post_ffw_norm(self._feed_forward(self._ffn_norm(active)))
        x = self._altup.corrected(x, added.add_(active))
        assert step.layer_input is not None
        first = x[:, self._active] if self._scale is None else x[:, self._active] * self._scale
        x[:, 1:] += self._gate(first.to(x.dtype), step.kept(step.layer_input))[:, None]
        return x if self._all_gather is None else self._all_gather(x)


class _Laurel:
    """x + norm(right(left(x))), with a narrow matrix on the left."""

    def __init__(self, w: TensorScope, sizes: Sizes) -> None:
        self._left = w.linear("laurel_l", shape=(None, sizes.hidden))
        rank = self._left.weight.shape[0]
        self._right = w.linear("laurel_r", shape=(sizes.hidden, rank or None))
        self._norm = w.rms_norm("laurel_post_norm", sizes.eps, size=sizes.hidden)
        self.row_elements = 3 * rank + 4 * sizes.hidden
        self.matrix_elements = rank * sizes.hidden

    def __call__(self, x: Tensor) -> Tensor:
        """x [tokens, hidden] -> a new [tokens, hidden]."""
        return self._norm(self._right(self._left(x))).add_(x)


def _far(w: TensorScope, sizes: Sizes) -> Rotary:
    base = sizes.metadata.get_positive("rope.freq_base", GLOBAL_BASE)
    return read_rotary(w, sizes.metadata, pairs=Pairs.NEOX, key_dim=sizes.key_dim, base=base)


def _near(far: Rotary, metadata: Metadata) -> Rotary:
    """Of layers that see a window: as many dimensions, another base, and no scaling."""
    ollama, llama_cpp = LOCAL_KEYS
    base = metadata.get_positive(ollama if metadata.has(ollama) else llama_cpp, LOCAL_BASE)
    frequencies = plain_frequencies(2 * far.frequencies.shape[0], base)
    return Rotary(frequencies.to(far.frequencies.device), Pairs.NEOX)


def _attention(
    w: TensorScope, sizes: Sizes, index: int, cache: LayerCache, *, stores: bool
) -> SelfAttention:
    if not stores:  # converters may keep them
        w.ignore("attn_k", "attn_v", "attn_k_norm")
    norm = partial(w.rms_norm, eps=sizes.eps, size=sizes.key_dim)
    return SelfAttention(
        w,
        hidden=sizes.hidden,
        heads=sizes.heads[index],
        cache=cache,
        scale=1.0,
        q_norm=norm("attn_q_norm"),
        k_norm=norm("attn_k_norm") if stores else None,
        v_norm=RMSNorm(None, sizes.eps),
        stores=stores,
    )


def _feed_forward(w: TensorScope, sizes: Sizes, index: int) -> GatedFeedForward:
    """In the first layers only gates well above their row's mean are open."""
    metadata, key = sizes.metadata, "activation_sparsity_scale"
    bounds = metadata.require_array(key, float, infinite=True)
    if len(bounds) != sizes.layers:
        raise metadata.error(key, f"has {len(bounds):,} entries for {sizes.layers:,} layers")
    gated = partial(_sparse_gelu_mul, bound=bounds[index]) if bounds[index] > 0 else gelu_mul
    size = sizes.feed_forward[index]
    return GatedFeedForward(w, hidden=sizes.hidden, size=size, gated=gated)


def _sparse_gelu_mul(gate: Tensor, up: Tensor, *, bound: float) -> Tensor:
    """gelu(relu(gate - mean - bound * deviation)) * up, of each row; in gate's type."""
    wide = gate.float()
    deviation, mean = torch.std_mean(wide, dim=-1, correction=0, keepdim=True)
    return gelu_mul((wide - mean.add_(deviation, alpha=bound)).relu_().to(gate.dtype), up)


def _correct_scale(w: TensorScope, sizes: Sizes) -> Tensor | None:
    """What the active stream is multiplied by where the layer's input meets it."""
    if sizes.metadata.get("altup.correct_scale", bool, True):
        return w.vector("altup_correct_scale", size=sizes.hidden)
    w.ignore("altup_correct_scale")
    return None


def _active_stream(metadata: Metadata, streams: int) -> int:
    active = metadata.get("altup.active_idx", int, 0)
    if not 0 <= active < streams:
        raise metadata.error("altup.active_idx", f"is {active}; there are {streams} streams")
    return active


def _input_width(metadata: Metadata) -> int:
    return layer_input_width(metadata) or DEFAULT_INPUT_WIDTH
