"""Gemma 4, the text model: dense, with inputs for each layer, or with experts beside."""

from dataclasses import dataclass, replace
from functools import partial

from torch import Tensor

from model_zoo.gguf.metadata import Metadata
from model_zoo.gguf.scope import TensorScope
from model_zoo.layers.attention import SelfAttention
from model_zoo.layers.block import Block, read_block
from model_zoo.layers.decoder import Decoder
from model_zoo.layers.experts import DenseAndExperts, Experts, ExpertSizes
from model_zoo.layers.feed_forward import GatedFeedForward
from model_zoo.layers.layer_inputs import LayerInputGate, TokenLayerInputs, layer_input_width
from model_zoo.layers.norm import RMSNorm
from model_zoo.layers.rope import Pairs, Rotary
from model_zoo.layers.rope_scaling import plain_frequencies, read_rotary
from model_zoo.layers.sizes import MAX_HEAD_DIM, Sizes
from model_zoo.layers.stack import Layer
from model_zoo.layers.step import Step
from runtime.kernels.pointwise import gelu_mul
from runtime.kv.spec import CacheKind, Full, Sliding

# The values of all models, as in Gemma4TextConfig of `transformers`.
DEFAULT_EPS, DEFAULT_HEAD_DIM, DEFAULT_LOCAL_HEAD_DIM = 1e-6, 512, 256
FULL_EVERY = 6
LOCAL_BASE, GLOBAL_BASE = 10_000.0, 1_000_000.0
LOGIT_CAP = 30.0  # that of all models
# Of each expert's output, as the first files of Ollama name it.
OLD_SCALE = "ffn_gate_inp.per_expert_scale"


@dataclass(frozen=True, slots=True, eq=False)
class _Reach:
    """What layers that see a window have in common, or those that see everything."""

    sizes: Sizes
    kind: CacheKind
    rotary: Rotary


def build_decoder(w: TensorScope, metadata: Metadata) -> Decoder:
    """Layers with a window have heads of another size than the others, and another rotation.

    The last layers may use the keys and values of earlier ones. Unlike in Gemma 3 the norms'
    weights are the model's own, and images are seen in both directions in layers with a window
    alone, in small models nowhere.
    """
    sizes = Sizes.read(metadata, eps=DEFAULT_EPS, head_dim=DEFAULT_HEAD_DIM)
    width = layer_input_width(metadata)
    sliding = sizes.sliding_layers(FULL_EVERY)
    near, far = _near(w, sizes, looks_ahead=width is None), _far(w, sizes)
    layers = [
        _layer(w.scope("blk", i), i, near if sliding[i] else far, source, width)
        for i, source in enumerate(sizes.cache_sources(sliding))
    ]
    return Decoder(
        w,
        sizes,
        layers,
        embedding_scale=sizes.hidden**0.5,
        logit_softcap=sizes.cap("final_logit_softcapping", LOGIT_CAP),
        layer_inputs=None if width is None else _layer_inputs(w, sizes, width),
    )


def _layer_inputs(w: TensorScope, sizes: Sizes, width: int) -> TokenLayerInputs:
    """Places in images count as padding."""
    key = "tokenizer.ggml.padding_token_id"
    padding = sizes.metadata.get(key, int, 0)
    if padding < 0:
        raise sizes.metadata.error(key, f"is {padding}, which no token is")
    return TokenLayerInputs(w, sizes, width=width, place=padding)


def _near(w: TensorScope, sizes: Sizes, *, looks_ahead: bool) -> _Reach:
    """Layers that see a window."""
    metadata, local = sizes.metadata, DEFAULT_LOCAL_HEAD_DIM
    dim = metadata.get_size("attention.key_length_swa", local, at_most=MAX_HEAD_DIM)
    value_dim = metadata.get_size("attention.value_length_swa", dim, at_most=MAX_HEAD_DIM)
    rotated = metadata.get_size("rope.dimension_count_swa", dim, at_most=dim)
    if rotated % 2:
        raise metadata.error("rope.dimension_count_swa", f"is {rotated}; it must be even")
    base = metadata.get_positive("rope.freq_base_swa", LOCAL_BASE)
    return _Reach(
        _equal_lengths(replace(sizes, key_dim=dim, value_dim=value_dim)),
        Sliding(metadata.require_size("attention.sliding_window"), looks_ahead),
        Rotary(plain_frequencies(rotated, base).to(w.device), Pairs.NEOX),
    )


def _far(w: TensorScope, sizes: Sizes) -> _Reach:
    """Layers that see everything; a file's `rope_freqs` keep most of their dimensions unturned."""
    metadata, key_dim, key = sizes.metadata, sizes.key_dim, "attention.global_head_count_kv"
    if metadata.has(key):
        kv_heads = metadata.require_size(key)
        if any(heads % kv_heads for heads in sizes.heads):
            raise metadata.error(key, f"is {kv_heads}, which does not divide the heads")
        sizes = replace(sizes, kv_heads=(kv_heads,) * sizes.layers)
    base = metadata.get_positive("rope.freq_base", GLOBAL_BASE)
    rotary = read_rotary(w, metadata, pairs=Pairs.NEOX, key_dim=key_dim, base=base)
    return _Reach(_equal_lengths(sizes), Full(looks_ahead=False), rotary)


def _equal_lengths(sizes: Sizes) -> Sizes:
    """Keys may serve as values."""
    if sizes.key_dim != sizes.value_dim:
        raise sizes.metadata.error(
            "attention.value_length",
            f"or that of layers with a window is {sizes.value_dim}; it must be {sizes.key_dim}, "
            "the length of the keys",
        )
    return sizes


def _layer(w: TensorScope, index: int, reach: _Reach, source: int, width: int | None) -> Layer:
    sizes, cache = reach.sizes, reach.sizes.cache(source, reach.kind)
    stores = source == index
    if not stores:  # converters may keep them
        w.ignore("attn_k", "attn_v", "attn_k_norm")
    attention = SelfAttention(
        w,
        hidden=sizes.hidden,
        heads=sizes.heads[index],
        cache=cache,
        scale=1.0,
        q_norm=w.rms_norm("attn_q_norm", sizes.eps, size=sizes.key_dim),
        k_norm=w.rms_norm("attn_k_norm", sizes.eps, size=sizes.key_dim) if stores else None,
        v_norm=RMSNorm(None, sizes.eps),
        stores=stores,
        keys_as_values=isinstance(reach.kind, Full),
    )
    block = _ScaledBlock(
        _block(w, sizes, index, attention),
        None if width is None else LayerInputGate(w, sizes, width=width),
        w.vector("layer_output_scale", size=1, optional=True),
    )
    return Layer(block, cache, reach.rotary, None if stores else source)


def _block(w: TensorScope, sizes: Sizes, index: int, attention: SelfAttention) -> Block:
    hidden = sizes.hidden
    dense = GatedFeedForward(w, hidden=hidden, size=sizes.feed_forward[index], gated=gelu_mul)
    if not w.has("ffn_gate_inp"):
        return read_block(w, sizes, attention, dense, post_norms=True)
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


def _experts(w: TensorScope, sizes: Sizes) -> Experts:
    """The router sees the residual by a norm of its own, whose weight files keep undivided."""
    hidden, counts = sizes.hidden, ExpertSizes.read(sizes.metadata)
    seen = w.table("ffn_gate_inp.scale", shape=(hidden,)) * hidden**-0.5
    return Experts(
        w,
        hidden=hidden,
        sizes=counts,
        gated=gelu_mul,
        router_norm=RMSNorm(seen, sizes.eps),
        norm=w.rms_norm("pre_ffw_norm_2", sizes.eps, size=hidden),
        down_scale=w.table(OLD_SCALE, shape=(counts.count,), optional=True),
    )


class _ScaledBlock:
    """A block, then the gated input of its layer if there is one, then all times a number."""

    def __init__(self, block: Block, gate: LayerInputGate | None, scale: Tensor | None) -> None:
        self._block, self._gate, self._scale = block, gate, scale
        self.row_elements, self.matrix_elements = block.row_elements, block.matrix_elements
        if gate is not None:
            self.row_elements = max(self.row_elements, gate.row_elements)
            self.matrix_elements = max(self.matrix_elements, gate.matrix_elements)

    def __call__(self, x: Tensor, step: Step) -> Tensor:
        """x [tokens, hidden] -> the same, or [outputs, hidden] of `step.rows` alone."""
        x = self._block(x, step)
        if self._gate is not None:
            assert step.layer_input is not None
            x = self._gate(x, step.kept(step.layer_input)).add_(x)
        return x if self._scale is None else x.mul_(self._scale)
