"""Gemma 4: the text model, dense with per-layer inputs, or with experts."""

from dataclasses import dataclass, replace
from functools import partial

from torch import Tensor

from model_zoo.gguf.metadata import Metadata
from model_zoo.gguf.scope import TensorScope
from model_zoo.gguf.tensors import derived
from model_zoo.layers.attention import AttentionOptions, SelfAttention
from model_zoo.layers.block import Block, BlockOptions
from model_zoo.layers.decoder import Decoder, DecoderOptions
from model_zoo.layers.experts import DenseAndExperts, ExpertOptions, Experts, ExpertSizes
from model_zoo.layers.feed_forward import GatedFeedForward
from model_zoo.layers.layer_inputs import LayerInputGate, TokenLayerInputs, layer_input_width
from model_zoo.layers.norm import RMSNorm
from model_zoo.layers.rope import Pairs, Rotary
from model_zoo.layers.rope_scaling import plain_frequencies, read_rotary
from model_zoo.layers.stack import TextLayer
from model_zoo.layers.step import Step
from model_zoo.layers.text_sizes import MAX_HEAD_DIM, TextSizes
from runtime.kernels.pointwise import add_, gelu_mul, scale_
from runtime.kv.cache_kinds import CacheKind, Full, Sliding

# Values of all models, as in Gemma4TextConfig of `transformers`.
DEFAULT_EPS, DEFAULT_HEAD_DIM, DEFAULT_LOCAL_HEAD_DIM = 1e-6, 512, 256
FULL_EVERY = 6
LOCAL_BASE, GLOBAL_BASE = 10_000.0, 1_000_000.0
LOGIT_CAP = 30.0  # the same in all models
# The tensor with the factor of each expert's output in Ollama's first files.
SCALE, OLD_SCALE = "ffn_down_exps.scale", "ffn_gate_inp.per_expert_scale"


@dataclass(frozen=True, slots=True, eq=False)
class _LayerSettings:
    """Settings shared by all layers with a window, or by all layers without one."""

    sizes: TextSizes
    kind: CacheKind
    rotary: Rotary


def build_decoder(w: TensorScope, metadata: Metadata) -> Decoder:
    """Layers with a window have other head sizes and another rotary embedding than those without.

    The last layers may use the keys and values of earlier ones. Unlike in Gemma 3, the norm weights
    in a file are those of the model, and image rows are bidirectional in layers with a window only,
    in small models in no layer.
    """
    sizes = TextSizes.read(metadata, eps=DEFAULT_EPS, head_dim=DEFAULT_HEAD_DIM)
    width = layer_input_width(metadata)
    sliding = sizes.sliding_layers(FULL_EVERY)
    local, full = _local_settings(w, sizes, looks_ahead=width is None), _global_settings(w, sizes)
    layers = [
        _layer(w.scope("blk", i), i, local if sliding[i] else full, source, width)
        for i, source in enumerate(sizes.cache_sources(sliding))
    ]
    options = DecoderOptions(
        embedding_scale=sizes.hidden**0.5,
        logit_softcap=sizes.cap("final_logit_softcapping", LOGIT_CAP),
        layer_inputs=None if width is None else _layer_inputs(w, sizes, width),
    )
    return Decoder(w, sizes, layers, options)


def _layer_inputs(w: TensorScope, sizes: TextSizes, width: int) -> TokenLayerInputs:
    """Image placeholders use the row of the padding token."""
    key = "tokenizer.ggml.padding_token_id"
    padding = sizes.metadata.get(key, int, 0)
    if padding < 0:
        raise sizes.metadata.error(key, f"is {padding}, which is not a token id")
    return TokenLayerInputs(w, sizes, width=width, place=padding)


def _local_settings(w: TensorScope, sizes: TextSizes, *, looks_ahead: bool) -> _LayerSettings:
    """Settings of layers with a window."""
    metadata, local = sizes.metadata, DEFAULT_LOCAL_HEAD_DIM
    dim = metadata.get_size("attention.key_length_swa", local, at_most=MAX_HEAD_DIM)
    value_dim = metadata.get_size("attention.value_length_swa", dim, at_most=MAX_HEAD_DIM)
    rotated = metadata.get_size("rope.dimension_count_swa", dim, at_most=dim)
    if rotated % 2:
        raise metadata.error("rope.dimension_count_swa", f"is {rotated}; it must be even")
    base = metadata.get_positive("rope.freq_base_swa", LOCAL_BASE)
    return _LayerSettings(
        _equal_lengths(replace(sizes, key_dim=dim, value_dim=value_dim)),
        Sliding(metadata.require_size("attention.sliding_window"), looks_ahead),
        Rotary(plain_frequencies(rotated, base).to(w.device), Pairs.NEOX),
    )


def _global_settings(w: TensorScope, sizes: TextSizes) -> _LayerSettings:
    """Settings of layers without a window; `rope_freqs` leave most of their dimensions
    unrotated."""
    metadata, key = sizes.metadata, "attention.global_head_count_kv"
    if metadata.has(key):
        kv_heads = metadata.require_size(key)
        if any(heads % kv_heads for heads in sizes.heads):
            raise metadata.error(key, f"is {kv_heads}, which does not divide the heads")
        sizes = replace(sizes, kv_heads=(kv_heads,) * sizes.layers)
    rotary = read_rotary(w, sizes, Pairs.NEOX, default_base=GLOBAL_BASE)
    return _LayerSettings(_equal_lengths(sizes), Full(looks_ahead=False), rotary)


def _equal_lengths(sizes: TextSizes) -> TextSizes:
    """`sizes` unchanged; ModelFileError if keys are too long or too short to serve as values."""
    if sizes.key_dim != sizes.value_dim:
        raise sizes.metadata.error(
            "attention.value_length",
            f"or that of layers with a window is {sizes.value_dim}; it must be {sizes.key_dim}, "
            "the length of the keys",
        )
    return sizes


def _layer(
    w: TensorScope, index: int, settings: _LayerSettings, source: int, width: int | None
) -> TextLayer:
    sizes, cache = settings.sizes, settings.sizes.cache(source, settings.kind)
    stores = source == index
    if not stores:  # converters may keep the unused tensors
        w.ignore("attn_k", "attn_v", "attn_k_norm")
    options = AttentionOptions(
        scale=1.0,
        q_norm=w.rms_norm("attn_q_norm", sizes.eps, size=sizes.key_dim),
        k_norm=w.rms_norm("attn_k_norm", sizes.eps, size=sizes.key_dim) if stores else None,
        v_norm=RMSNorm(None, sizes.eps),
        stores=stores,
        keys_as_values=isinstance(settings.kind, Full),
    )
    attention = SelfAttention(w, sizes, index, cache, options)
    block = _ScaledBlock(
        _block(w, sizes, index, attention),
        None if width is None else LayerInputGate(w, sizes, width=width),
        w.vector("layer_output_scale", size=1, optional=True),
    )
    return TextLayer(block, cache, settings.rotary, None if stores else source)


def _block(w: TensorScope, sizes: TextSizes, index: int, attention: SelfAttention) -> Block:
    hidden = sizes.hidden
    dense = GatedFeedForward(w, hidden=hidden, size=sizes.feed_forward[index], gated=gelu_mul)
    if not w.has("ffn_gate_inp"):
        return BlockOptions(post_norms=True).read(w, sizes, attention, dense)
    norm = partial(w.rms_norm, eps=sizes.eps, size=hidden)
    both = DenseAndExperts(
        norm("ffn_norm"),
        dense,
        norm("post_ffw_norm_1"),
        _experts(w, sizes),
        norm("post_ffw_norm_2"),
    )
    return Block(
        norm("attn_norm"),
        attention,
        None,
        both,
        norm("post_attention_norm"),
        norm("post_ffw_norm"),
    )


def _experts(w: TensorScope, sizes: TextSizes) -> Experts:
    """The router has its own norm of the residual; files store its weight times sqrt(hidden)."""
    hidden, counts = sizes.hidden, ExpertSizes.read(sizes.metadata)
    stored = w.table("ffn_gate_inp.scale", shape=(hidden,))
    seen = derived(lambda weight: weight * hidden**-0.5, stored)
    scale = w.table(SCALE, shape=(counts.count,), optional=True)
    if scale is None:
        scale = w.table(OLD_SCALE, shape=(counts.count,), optional=True)
    options = ExpertOptions(
        gated=gelu_mul,
        router_norm=RMSNorm(seen, sizes.eps),
        norm=w.rms_norm("pre_ffw_norm_2", sizes.eps, size=hidden),
        down_scale=scale,
    )
    return Experts(w, hidden, counts, options)


class _ScaledBlock:
    """A block, then the gated per-layer input if there is one, then a scalar factor."""

    def __init__(self, block: Block, gate: LayerInputGate | None, scale: Tensor | None) -> None:
        self._block, self._gate = block, gate
        self._scale = float(scale) if scale is not None and scale.device.type == "cpu" else scale
        self.row_elements, self.matrix_elements = block.row_elements, block.matrix_elements
        if gate is not None:
            self.row_elements = max(self.row_elements, gate.row_elements)
            self.matrix_elements = max(self.matrix_elements, gate.matrix_elements)

    def __call__(self, x: Tensor, step: Step) -> Tensor:
        """x [tokens, hidden] -> the same shape, or [outputs, hidden] if `step.rows` selects
        rows."""
        x = self._block(x, step)
        if self._gate is not None:
            assert step.layer_input is not None
            x = add_(self._gate(x, step.kept(step.layer_input)), x)
        return x if self._scale is None else scale_(x, self._scale)
