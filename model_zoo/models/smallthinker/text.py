"""SmallThinker: experts with ReLU, chosen by the input of the layer; in the larger model, most
layers have a window, and the others no rotation."""

from model_zoo.gguf.metadata import Metadata
from model_zoo.gguf.scope import TensorScope
from model_zoo.layers.attention import SelfAttention
from model_zoo.layers.attention_layer import Attended, alternating_layers
from model_zoo.layers.block import EarlyRoutedBlock
from model_zoo.layers.decoder import Decoder, TextLayer
from model_zoo.layers.experts import ExpertOptions, Experts, ExpertSizes
from model_zoo.layers.leading_dense import SIGMOID, stated_routing
from model_zoo.layers.rope import Pairs, Rotary
from model_zoo.layers.rope_scaling import read_rotary
from model_zoo.layers.text_sizes import TextSizes
from runtime.kernels.pointwise import relu_mul
from runtime.kv.cache_kinds import CacheKind, Full

FULL_EVERY = 4  # layers of the models with windows


def build_decoder(w: TensorScope, metadata: Metadata) -> Decoder:
    """The window is that of the file, where llama.cpp computes with 4,096 tokens. Without one, all
    layers have the rotation."""
    sizes = TextSizes.read(metadata)
    rotary, window = read_rotary(w, sizes, Pairs.NEOX), sizes.window()
    near: Attended = window, rotary
    far: Attended = (Full(), None) if window != Full() else near
    slides = sizes.sliding_layers(FULL_EVERY, full=0)
    return Decoder(w, sizes, alternating_layers(w, sizes, slides, _layer, near=near, far=far))


def _layer(
    w: TensorScope, sizes: TextSizes, index: int, kind: CacheKind, rotary: Rotary | None
) -> TextLayer:
    """The weights of experts are divided by their sum."""
    metadata, counts = sizes.metadata, ExpertSizes.read(sizes.metadata)
    routing = stated_routing(w, metadata, counts.count, SIGMOID, renormalised=True)
    cache = sizes.cache(index, kind)
    block = EarlyRoutedBlock(
        w.rms_norm("attn_norm", sizes.eps, size=sizes.hidden),
        SelfAttention(w, sizes, index, cache),
        w.rms_norm("ffn_norm", sizes.eps, size=sizes.hidden),
        Experts(w, sizes.hidden, counts, ExpertOptions(routing=routing, gated=relu_mul)),
    )
    return TextLayer(block, cache, rotary)
