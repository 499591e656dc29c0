"""Gemma 3n, the text model."""

from dataclasses import replace
from functools import partial

import torch
from torch import Tensor

from model_zoo.conversion import checks, decoders
from model_zoo.conversion.configuration import Configuration
from model_zoo.conversion.mapping import LLAMA_CPP, OLLAMA, Conversion, Key, Rule
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
        self._spread = Spread(w, sizes, streams=streams) if index == 0 else None
        self._gathered = Gathered(w, sizes, streams=streams) if last else None
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
        x = self._altup.predicted(x if self._spread is None else self._spread(x))
        normal = self._attn_norm(x[:, self._active])
        attended = self._post_attention_norm(self._attention(normal, step))
        x, normal = step.kept(x), step.kept(normal)
        active = attended.add_(x[:, self._active]).add_(self._laurel(normal)).mul_(SQUARE_HALF)
        added = self._post_ffw_norm(self._feed_forward(self._ffn_norm(active)))
        x = self._altup.corrected(x, added.add_(active))
        assert step.layer_input is not None
        first = x[:, self._active] if self._scale is None else x[:, self._active] * self._scale
        x[:, 1:] += self._gate(first.to(x.dtype), step.kept(step.layer_input))[:, None]
        return x if self._gathered is None else self._gathered(x)


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
    return read_rotary(w, sizes.metadata, pairs=Pairs.HALVES, key_dim=sizes.key_dim, base=base)


def _near(far: Rotary, metadata: Metadata) -> Rotary:
    """Of layers that see a window: as many dimensions, another base, and no scaling."""
    ollama, llama_cpp = LOCAL_KEYS
    base = metadata.get_positive(ollama if metadata.has(ollama) else llama_cpp, LOCAL_BASE)
    frequencies = plain_frequencies(2 * far.frequencies.shape[0], base)
    return Rotary(frequencies.to(far.frequencies.device), Pairs.HALVES)


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


def _local_base(config: Configuration) -> float:
    """Nested in newer files, beside the other in older ones."""
    older = config.get("rope_local_base_freq")
    if older is not None:
        return float(older)
    nested = "sliding_attention" in (config.get("rope_parameters") or {})
    return decoders.rope_base(config, "sliding_attention") if nested else LOCAL_BASE


def _windows(config: Configuration) -> list[bool]:
    return decoders.windows(config, every=FULL_EVERY)


def _stores(config: Configuration, layer: int) -> bool:
    """Whether the layer has keys and values of its own."""
    return layer < config.layers - int(config.require("num_kv_shared_layers"))


def _sparsity_bounds(config: Configuration) -> list[float]:
    """How many deviations above the mean gates open, where so large a share shall stay shut."""
    shares = config.get("activation_sparsity_pattern")
    if shares is None:
        sparse = 10 if config.layers > 10 else 0
        shares = [0.95] * sparse + [0.0] * (config.layers - sparse)
    listed = shares if isinstance(shares, list) else [shares] * config.layers
    normal = torch.distributions.Normal(0, 1)
    return [normal.icdf(torch.tensor(float(share))).item() for share in listed]


def _filled_up(config: Configuration, table: Tensor) -> Tensor:
    """A row for each token of the vocabulary: those beyond the table have its first."""
    missing = config.require_size("vocab_size") - table.shape[0]
    return torch.cat([table, table[:1].expand(missing, -1)]) if missing > 0 else table


def _layer_rule(source: str, target: str) -> Rule:
    return Rule(f"layers.{{n}}.{source}", f"blk.{{n}}.{target}.weight")


def _kept_rules(source: str, target: str) -> tuple[Rule, Rule]:
    """Layers that share keys may have unused projections, without which llama.cpp reads no file."""
    rule = _layer_rule(f"{source}.weight", target)
    unused = replace(rule, only=lambda config, layer: not _stores(config, layer), optional=True)
    return replace(rule, only=_stores), unused


_LAYER_TENSORS = {
    "input_layernorm": "attn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.o_proj": "attn_output",
    "post_attention_layernorm": "post_attention_norm",
    "pre_feedforward_layernorm": "ffn_norm",
    "post_feedforward_layernorm": "post_ffw_norm",
    "per_layer_input_gate": "inp_gate",
    "per_layer_projection": "proj",
    "post_per_layer_input_norm": "post_norm",
    "altup.correction_coefs": "altup_correct_coef",
    "altup.prediction_coefs": "altup_predict_coef",
    "altup.modality_router": "altup_router",
    "altup.router_norm": "altup_router_norm",
    "laurel.linear_left": "laurel_l",
    "laurel.linear_right": "laurel_r",
    "laurel.post_laurel_norm": "laurel_post_norm",
}
_STORING_TENSORS = {
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.k_norm": "attn_k_norm",
}
CONVERSION = Conversion(
    serves=("Gemma3nForCausalLM", "Gemma3nForConditionalGeneration"),
    architecture="gemma3n",
    keys=(
        *decoders.SIZES,
        *decoders.HEAD_SIZES,
        Key("head_dim", lambda c: c.head_dim, flavours=(OLLAMA,)),
        Key("attention.sliding_window", "sliding_window"),
        Key("attention.sliding_window_pattern", _windows),
        Key("attention.shared_kv_layers", "num_kv_shared_layers"),
        Key("rope.freq_base", decoders.rope_base),
        Key("rope.freq_base_swa", _local_base, flavours=(LLAMA_CPP,)),
        Key("rope.freq_base_local", _local_base, flavours=(OLLAMA,)),
        *decoders.LINEAR_SCALING,
        Key("embedding_length_per_layer_input", "hidden_size_per_layer_input"),
        Key("activation_sparsity_scale", _sparsity_bounds),
        Key("altup.active_idx", "altup_active_idx"),
        Key("altup.num_inputs", "altup_num_inputs"),
        Key("altup.correct_scale", "altup_correct_scale", of=bool),
        Key("final_logit_softcapping", "final_logit_softcapping", of=float),
    ),
    rules=(
        *decoders.EMBEDDINGS,
        Rule("embed_tokens_per_layer.weight", "per_layer_token_embd.weight", _filled_up),
        Rule("per_layer_model_projection.weight", "per_layer_model_proj.weight"),
        Rule("per_layer_projection_norm.weight", "per_layer_proj_norm.weight"),
        Rule("altup_projections.{e}.weight", "altup_proj.weight"),
        Rule("altup_unembed_projections.{e}.weight", "altup_unembd_proj.weight"),
        *(_layer_rule(f"{source}.weight", name) for source, name in _LAYER_TENSORS.items()),
        *(rule for names in _STORING_TENSORS.items() for rule in _kept_rules(*names)),
        _layer_rule("altup.correct_output_scale", "altup_correct_scale"),
        *decoders.feed_forward(),
    ),
    drop=(*decoders.BUFFERS, *decoders.OTHER_PARTS),
    defaults={
        "vocab_size": 262400,
        "num_attention_heads": 8,
        "num_key_value_heads": 2,
        "head_dim": 256,
        "max_position_embeddings": 32768,
        "rms_norm_eps": 1e-6,
        "rope_theta": 1000000.0,
        "sliding_window": 512,
        "hidden_size_per_layer_input": 256,
        "num_kv_shared_layers": 15,
        "altup_active_idx": 0,
        "altup_num_inputs": 4,
        "altup_correct_scale": True,
        "final_logit_softcapping": 30.0,
        "tie_word_embeddings": True,
    },
    check=checks.only_scalings("linear"),
)
