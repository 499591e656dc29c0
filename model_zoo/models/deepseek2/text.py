"""DeepSeek V2 and V3, their Lite and R1 models, and others of this architecture."""

from dataclasses import replace

from gguf import ExpertGatingFuncType

from model_zoo.gguf.metadata import Metadata
from model_zoo.gguf.scope import TensorScope
from model_zoo.layers.block import RowWise, read_block
from model_zoo.layers.decoder import Decoder, TextLayer
from model_zoo.layers.experts import ExpertOptions, Experts, ExpertSizes
from model_zoo.layers.feed_forward import GatedFeedForward
from model_zoo.layers.latent_attention import LatentAttention, LatentSizes
from model_zoo.layers.rope import Pairs, Rotary
from model_zoo.layers.rope_scaling import log_scale, read_rotary
from model_zoo.layers.text_sizes import MAX_HEAD_DIM, TextSizes
from runtime.errors import UnsupportedModelError
from runtime.kernels.routing import Routing, Scores
from runtime.kv.spec import Full

# A tenth of `mscale_all_dim`; converters divide by ten.
LOG_MULTIPLIER = "rope.scaling.yarn_log_multiplier"
# `expert_gating_func`; files of V2 may lack the key.
SOFTMAX, SIGMOID = ExpertGatingFuncType.SOFTMAX.value, ExpertGatingFuncType.SIGMOID.value
MAX_RANK = 1 << 16


def build_decoder(w: TensorScope, metadata: Metadata) -> Decoder:
    """Latent attention; the leading layers are dense, the others have experts.

    Rotary pairs are interleaved, as in the authors' checkpoints.
    """
    sizes = TextSizes.read(metadata)
    rotated = metadata.require_size("rope.dimension_count", at_most=MAX_HEAD_DIM)
    rotary = _rotary(w, metadata, rotated)
    layers = [_layer(w.scope("blk", i), sizes, i, rotary, rotated) for i in range(sizes.layers)]
    return Decoder(w, sizes, layers)


def _layer(w: TensorScope, sizes: TextSizes, index: int, rotary: Rotary, rotated: int) -> TextLayer:
    latent = _latent_sizes(w, sizes, index, rotated)
    scale = _scale(sizes.metadata, latent.query)
    attention = LatentAttention(w, latent, hidden=sizes.hidden, eps=sizes.eps, scale=scale)
    block = read_block(w, sizes, attention, _feed_forward(w, sizes, index))
    return TextLayer(block, latent.cache(Full()), rotary, rotated_from=latent.latent)


def _latent_sizes(w: TensorScope, sizes: TextSizes, index: int, rotated: int) -> LatentSizes:
    """Sizes of a layer. In files with `attn_k_b`, `key_length` is the size of a cached row; in
    older files it is the size of a head."""
    metadata, names = sizes.metadata, ("attention.key_length", "attention.value_length")
    keys = (f"{key}_mla" if metadata.has(f"{key}_mla") else key for key in names)
    query, value = (metadata.require_size(key, at_most=MAX_HEAD_DIM) for key in keys)
    if query <= rotated:
        raise metadata.error(
            "rope.dimension_count", f"is {rotated}; it must be below {query}, the size of a query"
        )
    rank = None
    if metadata.has("attention.q_lora_rank") and not w.has("attn_q"):
        rank = metadata.require_size("attention.q_lora_rank", at_most=MAX_RANK)
    return LatentSizes(
        heads=sizes.heads[index],
        latent=metadata.require_size("attention.kv_lora_rank", at_most=MAX_HEAD_DIM),
        plain=query - rotated,
        rotated=rotated,
        value=value,
        query_rank=rank,
    )


def _rotary(w: TensorScope, metadata: Metadata, rotated: int) -> Rotary:
    """The rotary embedding. If the file states a multiplier of the scores, YaRN does not change the
    magnitude of queries and keys, because `mscale` equals `mscale_all_dim` in all models."""
    rotary = read_rotary(
        w,
        metadata,
        pairs=Pairs.INTERLEAVED,
        key_dim=rotated,
        base=metadata.get_positive("rope.freq_base"),
    )
    return replace(rotary, magnitude=1.0) if metadata.has(LOG_MULTIPLIER) else rotary


def _scale(metadata: Metadata, query: int) -> float:
    """The factor of scores, which with YaRN includes the square of its logarithmic term."""
    if metadata.get("rope.scaling.type", str) != "yarn":
        return query**-0.5
    weight = 10 * metadata.get(LOG_MULTIPLIER, float, 0.0)
    return query**-0.5 * log_scale(metadata.get_positive("rope.scaling.factor"), weight) ** 2


def _feed_forward(w: TensorScope, sizes: TextSizes, index: int) -> RowWise:
    metadata, hidden = sizes.metadata, sizes.hidden
    if index < metadata.get("leading_dense_block_count", int, 0):
        return GatedFeedForward(w, hidden=hidden, size=sizes.feed_forward[index])
    counts = ExpertSizes.read(metadata)
    shared = metadata.get("expert_shared_count", int, 0)
    width = metadata.require_size("expert_feed_forward_length") * shared
    options = ExpertOptions(
        routing=_routing(w, metadata, counts.count),
        shared=GatedFeedForward(w, hidden=hidden, size=width, suffix="_shexp") if width else None,
    )
    return Experts(w, hidden, counts, options)


def _routing(w: TensorScope, metadata: Metadata, experts: int) -> Routing:
    """V2 ranks groups by their best expert, V3 by the sum of the two best."""
    key = "expert_gating_func"
    function = metadata.get(key, int, SOFTMAX)
    if function not in (SOFTMAX, SIGMOID):
        raise UnsupportedModelError(
            f"{metadata.path}: `{metadata.full_key(key)}` is {function}; supported are {SOFTMAX} "
            f"(softmax) and {SIGMOID} (sigmoid)."
        )
    groups, used = metadata.get_size("expert_group_count", 1, at_most=experts), 1
    if groups > 1 or metadata.has("expert_group_used_count"):
        used = metadata.require_size("expert_group_used_count", at_most=groups)
    if experts % groups:
        raise metadata.error(
            "expert_group_count", f"is {groups}, which does not divide {experts} experts"
        )
    return Routing(
        Scores.SIGMOID if function == SIGMOID else Scores.SOFTMAX,
        groups=groups,
        used_groups=used,
        group_pairs=function == SIGMOID,
        bias=w.table("exp_probs_b.bias", shape=(experts,), optional=True),
        renormalised=metadata.get("expert_weights_norm", bool, False),
        scale=metadata.get_positive("expert_weights_scale", 1.0),
    )
