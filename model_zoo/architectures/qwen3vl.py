"""Qwen 3-VL: the text model, dense or with experts."""

from torch import Tensor

from model_zoo.conversion import checks, decoders
from model_zoo.conversion.configuration import Configuration
from model_zoo.conversion.mapping import LLAMA_CPP, OLLAMA, Conversion, Key, Rule, Transform
from model_zoo.conversion.transforms import (
    first_half,
    second_half,
    transposed,
)
from model_zoo.gguf.metadata import Metadata
from model_zoo.gguf.scope import TensorScope
from model_zoo.layers.attention import SelfAttention
from model_zoo.layers.block import RowWise, read_block
from model_zoo.layers.decoder import Decoder, Layer
from model_zoo.layers.experts import Experts, ExpertSizes, stated_softmax
from model_zoo.layers.feed_forward import GatedFeedForward
from model_zoo.layers.rope import Pairs, Rotary
from model_zoo.layers.rope_scaling import read_rotary
from model_zoo.layers.rope_sections import in_sections
from model_zoo.layers.sizes import Sizes
from runtime.errors import UnsupportedModelError
from runtime.kv.spec import Full

# The values of all models, as in Qwen3VLTextConfig of `transformers`.
SECTIONS, EPS, DEFAULT_HEAD_DIM = (24, 20, 20), 1e-6, 128


def build_decoder(w: TensorScope, metadata: Metadata) -> Decoder:
    """As Qwen 3, but that heads turn by time, row and column in turn.

    The tower's further features are added to the first layers' rows, as many as it brings.
    """
    sizes = Sizes.read(metadata, eps=EPS, head_dim=DEFAULT_HEAD_DIM)
    base = metadata.get_positive("rope.freq_base")
    plain = read_rotary(
        w, metadata, pairs=Pairs.HALVES, key_dim=sizes.key_dim, dim=sizes.key_dim, base=base
    )
    rotary = in_sections(plain, metadata, default=SECTIONS, interleaved=True)
    layers = [_layer(w.scope("blk", i), sizes, i, rotary) for i in range(sizes.layers)]
    return Decoder(w, sizes, layers)


def _layer(w: TensorScope, sizes: Sizes, index: int, rotary: Rotary) -> Layer:
    cache = sizes.cache(index, Full())
    attention = SelfAttention(
        w,
        hidden=sizes.hidden,
        heads=sizes.heads[index],
        cache=cache,
        scale=sizes.key_dim**-0.5,
        q_norm=w.rms_norm("attn_q_norm", sizes.eps, size=sizes.key_dim),
        k_norm=w.rms_norm("attn_k_norm", sizes.eps, size=sizes.key_dim),
    )
    return Layer(read_block(w, sizes, attention, _feed_forward(w, sizes, index)), cache, rotary)


def _feed_forward(w: TensorScope, sizes: Sizes, index: int) -> RowWise:
    metadata = sizes.metadata
    if not metadata.get("expert_count", int, 0):
        return GatedFeedForward(w, hidden=sizes.hidden, size=sizes.feed_forward[index])
    return Experts(
        w,
        hidden=sizes.hidden,
        sizes=ExpertSizes.read(metadata),
        routing=stated_softmax(metadata),
    )


def _sections(config: Configuration) -> list[int]:
    return [int(count) for count in config.rope().get("mrope_section", SECTIONS)]


def _deep_layers(config: Configuration) -> int:
    """How many layers get features from layers of the tower before its last."""
    return len((config.whole.get("vision_config") or {}).get("deepstack_visual_indexes") or ())


def _experts_everywhere(config: Configuration) -> None:
    if config.get("mlp_only_layers") or config.get("decoder_sparse_step", 1) != 1:
        raise UnsupportedModelError(
            f"{config.path}: has layers without experts, which this architecture's files "
            "cannot tell."
        )


def _experts(name: str, target: str, size: str, half: Transform | None = None) -> Rule:
    """The gate's rows stand before those of up; `size`: of the inputs.

    The authors' checkpoints have inputs before outputs, those that newer software saves not.
    """

    def turned(config: Configuration, matrix: Tensor) -> Tensor:
        inward = matrix.shape[1] != config.require_size(size)
        rows = transposed(config, matrix) if inward else matrix
        return rows if half is None else half(config, rows)

    source = f"layers.{{n}}.mlp.experts.{name}"
    return Rule(source, f"blk.{{n}}.{target}.weight", turned, each=True)


_KEYS = (
    *decoders.KEYS,
    *decoders.YARN_SCALING,
    Key("rope.dimension_sections", lambda c: [*_sections(c), 0], flavours=(LLAMA_CPP,)),
    Key("n_deepstack_layers", _deep_layers, flavours=(LLAMA_CPP,)),
    Key("mrope_sections", _sections, flavours=(OLLAMA,)),
)
_RULES = (
    *decoders.EMBEDDINGS,
    *decoders.attention(),
    *decoders.PRE_NORMS,
    *decoders.HEAD_NORMS,
)
CONVERSION = Conversion(
    serves=("Qwen3VLForConditionalGeneration",),
    architecture="qwen3vl",
    keys=_KEYS,
    rules=(*_RULES, *decoders.feed_forward()),
    drop=(*decoders.BUFFERS, *decoders.OTHER_PARTS),
    check=checks.all_of(checks.only_scalings("yarn", "mrope"), checks.no_windows),
)
WITH_EXPERTS = Conversion(
    serves=("Qwen3VLMoeForConditionalGeneration",),
    architecture="qwen3vlmoe",
    keys=(
        *_KEYS,
        *decoders.EXPERT_COUNTS,
        Key("expert_feed_forward_length", "moe_intermediate_size"),
        Key("expert_weights_norm", "norm_topk_prob", of=bool),
        Key("norm_top_k_prob", "norm_topk_prob", of=bool),
    ),
    rules=(
        *_RULES,
        Rule("layers.{n}.mlp.gate.weight", "blk.{n}.ffn_gate_inp.weight"),
        _experts("gate_up_proj", "ffn_gate_exps", "hidden_size", first_half),
        _experts("gate_up_proj", "ffn_up_exps", "hidden_size", second_half),
        _experts("down_proj", "ffn_down_exps", "moe_intermediate_size"),
    ),
    drop=(*decoders.BUFFERS, *decoders.OTHER_PARTS),
    defaults={"norm_topk_prob": True},
    check=checks.all_of(
        checks.only_scalings("yarn", "mrope"), checks.no_windows, _experts_everywhere
    ),
)
