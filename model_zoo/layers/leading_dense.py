"""Experts whose routing the file states, and layers before them that are dense."""

from gguf import ExpertGatingFuncType

from model_zoo.gguf.metadata import Metadata
from model_zoo.gguf.scope import TensorScope
from model_zoo.layers.block import RowWise
from model_zoo.layers.experts import ExpertOptions, Experts, ExpertSizes
from model_zoo.layers.feed_forward import GatedFeedForward
from model_zoo.layers.text_sizes import TextSizes
from runtime.errors import UnsupportedModelError
from runtime.kernels.pointwise import Gate, silu_mul
from runtime.kernels.routing import Routing, Scores

# Values of `expert_gating_func`.
SOFTMAX, SIGMOID = ExpertGatingFuncType.SOFTMAX.value, ExpertGatingFuncType.SIGMOID.value


def leading_dense_or_experts(
    w: TensorScope,
    sizes: TextSizes,
    index: int,
    *,
    scores: int,
    renormalised: bool = False,
    gated: Gate = silu_mul,
    averaged: bool = False,
    shared_width: int = 0,
) -> RowWise:
    """A feed-forward in the first `leading_dense_block_count` layers; of the others, every
    `interleave_moe_layer_step`-th layer, by default each, has `stated_experts`. gated: as in
    `GatedFeedForward`, everywhere."""
    if _is_dense(sizes.metadata, index):
        size = sizes.feed_forward[index]
        return GatedFeedForward(w, hidden=sizes.hidden, size=size, gated=gated)
    return stated_experts(
        w,
        sizes,
        scores=scores,
        renormalised=renormalised,
        gated=gated,
        shared_gated=gated,
        averaged=averaged,
        shared_width=shared_width,
    )


def stated_experts(
    w: TensorScope,
    sizes: TextSizes,
    *,
    scores: int,
    renormalised: bool = False,
    gated: Gate = silu_mul,
    shared_gated: Gate = silu_mul,
    averaged: bool = False,
    shared_width: int = 0,
) -> Experts:
    """Experts, and a shared one if the file counts any or has one of `shared_width`.

    scores, renormalised: the values of `expert_gating_func` and `expert_weights_norm` for files
    without the keys. gated, shared_gated: as in `GatedFeedForward`, of experts and the shared one.
    averaged: half of the sum of the experts and the shared one is the output. shared_width: of the
    shared one in files that state neither its width nor a count.
    """
    metadata, hidden = sizes.metadata, sizes.hidden
    counts, width = ExpertSizes.read(metadata), _shared_width(metadata, shared_width)
    shared = None
    if width:
        shared = GatedFeedForward(w, hidden=hidden, size=width, suffix="_shexp", gated=shared_gated)
    routing = stated_routing(w, metadata, counts.count, scores, renormalised=renormalised)
    half = 0.5 if averaged and shared is not None else None
    options = ExpertOptions(routing=routing, gated=gated, shared=shared, output_scale=half)
    return Experts(w, hidden, counts, options)


def stated_routing(
    w: TensorScope, metadata: Metadata, experts: int, scores: int, *, renormalised: bool = False
) -> Routing:
    """The routing that the keys of the file state; scores, renormalised: as above.

    With softmax, groups are ranked by their best expert (DeepSeek V2), with sigmoid by the sum of
    the two best (V3).
    """
    key = "expert_gating_func"
    function = metadata.get(key, int, 0) or scores  # converters write 0 where nothing is stated
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
    suffix = "" if w.shape("exp_probs_b", whole=True) else ".bias"  # as in files of Hunyuan 3
    return Routing(
        Scores.SIGMOID if function == SIGMOID else Scores.SOFTMAX,
        groups=groups,
        used_groups=used,
        group_pairs=function == SIGMOID,
        bias=w.table(f"exp_probs_b{suffix}", shape=(experts,), optional=True),
        renormalised=metadata.get("expert_weights_norm", bool, renormalised),
        scale=metadata.get_positive("expert_weights_scale", 1.0),
    )


def _is_dense(metadata: Metadata, index: int) -> bool:
    step = metadata.get_size("interleave_moe_layer_step", 1)
    return index < metadata.get("leading_dense_block_count", int, 0) or (index + 1) % step > 0


def _shared_width(metadata: Metadata, unstated: int) -> int:
    """The width of the shared expert, 0 if there is none: as stated, else that of the number of
    experts that it stands for, else `unstated`."""
    key, count = "expert_shared_feed_forward_length", "expert_shared_count"
    if metadata.has(key):
        return metadata.require_size(key)
    if unstated and not metadata.has(count):
        return unstated
    return metadata.require_size("expert_feed_forward_length") * metadata.get(count, int, 0)
