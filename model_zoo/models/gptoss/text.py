"""gpt-oss, the open models of OpenAI."""

from functools import partial

from model_zoo.gguf.metadata import Metadata
from model_zoo.gguf.scope import TensorScope
from model_zoo.layers.attention import AttentionOptions, SelfAttention, read_sinks
from model_zoo.layers.block import Block
from model_zoo.layers.decoder import Decoder, TextLayer
from model_zoo.layers.experts import ExpertOptions, Experts
from model_zoo.layers.rope import Pairs, Rotary
from model_zoo.layers.rope_scaling import read_rotary
from model_zoo.layers.text_sizes import TextSizes
from runtime.kernels.experts import clamped_swiglu
from runtime.kv.cache_kinds import Full, Sliding
from runtime.kv.cache_layout import LayerCache

# Values of both models, as in GptOssConfig of `transformers`.
DEFAULT_WINDOW, DEFAULT_HEAD_DIM, DEFAULT_EPS = 128, 64, 1e-5
DEFAULT_BASE, ORIGINAL_CONTEXT = 150_000.0, 4096
FULL_EVERY = 2
BIASED = (
    "attn_qkv", "attn_q", "attn_k", "attn_v", "attn_output", "attn_out", "ffn_gate_inp",
    "ffn_gate_exps", "ffn_up_exps", "ffn_gate_up_exps", "ffn_down_exps",
)  # fmt: skip
GATED = partial(clamped_swiglu, limit=7.0, slope=1.702)


def build_decoder(w: TensorScope, metadata: Metadata) -> Decoder:
    """Even layers have a window. Each head has an attention sink; all layers have experts."""
    sizes = TextSizes.read(metadata, eps=DEFAULT_EPS, head_dim=DEFAULT_HEAD_DIM)
    window = Sliding(metadata.get_size("attention.sliding_window", DEFAULT_WINDOW))
    rotary = read_rotary(
        w,
        sizes,
        Pairs.NEOX,
        default_base=DEFAULT_BASE,
        kind="yarn",
        original_context=ORIGINAL_CONTEXT,
        truncate=False,
    )
    sliding = sizes.sliding_layers(FULL_EVERY)
    caches = [sizes.cache(i, window if slides else Full()) for i, slides in enumerate(sliding)]
    layers = [_layer(w.scope("blk", i), sizes, i, cache, rotary) for i, cache in enumerate(caches)]
    return Decoder(w, sizes, layers)


def _layer(
    w: TensorScope, sizes: TextSizes, index: int, cache: LayerCache, rotary: Rotary
) -> TextLayer:
    """Ollama's first files name the output projection and the second norm differently."""
    output = "attn_out" if w.has("attn_out") else "attn_output"
    w.need_biases(*BIASED)
    options = AttentionOptions(sinks=read_sinks(w, sizes.heads[index]), output=output)
    attention = SelfAttention(w, sizes, index, cache, options)
    experts = Experts.read(w, sizes, ExpertOptions(gated=GATED, alternating=True))
    attn_norm = w.rms_norm("attn_norm", sizes.eps, size=sizes.hidden)
    ffn_norm = w.rms_norm("post_attention_norm", sizes.eps, size=sizes.hidden, alt="ffn_norm")
    return TextLayer(Block(attn_norm, attention, ffn_norm, experts), cache, rotary)
