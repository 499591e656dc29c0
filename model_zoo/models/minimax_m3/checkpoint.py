"""MiniMax M3: conversion of text model checkpoints to GGUF."""

from collections.abc import Mapping
from typing import Any

from gguf import ExpertGatingFuncType

from model_zoo.convert import checks, decoders
from model_zoo.convert.configuration import Configuration
from model_zoo.convert.mapping import LLAMA_CPP, Conversion, Key, Rule
from model_zoo.convert.transforms import plus_one
from model_zoo.models.minimax_m3.text import LIMIT, SLOPE

_EXPERTS = "block_sparse_moe"
# Settings of the indexer: names of `transformers` and, in `sparse_attention_config`, the authors'.
_INDEXER = {
    "head_count": ("index_n_heads", "sparse_num_index_heads"),
    "key_length": ("index_head_dim", "sparse_index_dim"),
    "top_k": ("index_topk_blocks", "sparse_topk_blocks"),
    "block_size": ("index_block_size", "sparse_block_size"),
    "local_blocks": ("index_local_blocks", "sparse_local_block"),
}


def _of_indexer(name: str, authors_name: str) -> Any:
    """The source of a key of the indexer."""

    def source(config: Configuration) -> int:
        nested = config.get("sparse_attention_config")
        if isinstance(nested, Mapping) and authors_name in nested:
            return int(nested[authors_name])
        return int(config.require(name))

    return source


def _leading_dense(config: Configuration) -> int:
    """The number of leading layers, which are dense, as listed by either name."""
    listed = config.get("moe_layer_freq")
    if listed is None:
        return decoders.leading_dense(config)
    count = len(listed) - sum(map(bool, listed))
    if [bool(each) for each in listed] != [layer >= count for layer in range(config.layers)]:
        raise config.error("has `moe_layer_freq` that is not 0 first and then 1")
    return count


def _leads(config: Configuration, layer: int) -> bool:
    return layer < _leading_dense(config)


def _follows(config: Configuration, layer: int) -> bool:
    return not _leads(config, layer)


def _shared_count(config: Configuration) -> int:
    """The number of experts that the shared one is as wide as."""
    shared, width = (config.require_size(f"{name}intermediate_size") for name in ("shared_", ""))
    if shared % width:
        raise config.error(f"has a shared expert of {shared}, which {width} does not divide")
    return shared // width


CONVERSION = Conversion(
    serves=("MiniMaxM3SparseForConditionalGeneration",),
    model_types=("minimax_m3_vl_text",),
    architecture={LLAMA_CPP: "minimax-m3"},
    keys=(
        *(key for key in decoders.KEYS if key.name != "feed_forward_length"),
        Key("feed_forward_length", "dense_intermediate_size"),
        *decoders.EXPERT_COUNTS,
        Key("expert_feed_forward_length", "intermediate_size"),
        Key("expert_shared_count", _shared_count),
        Key("expert_weights_scale", "routed_scaling_factor", of=float),
        Key("expert_weights_norm", lambda c: True),
        Key("expert_gating_func", lambda c: ExpertGatingFuncType.SIGMOID.value),
        Key("leading_dense_block_count", _leading_dense),
        *(
            Key(f"attention.indexer.{name}", _of_indexer(*settings))
            for name, settings in _INDEXER.items()
        ),
    ),
    rules=(
        *decoders.EMBEDDINGS_PLUS_ONE,
        *decoders.attention(),
        *decoders.HEAD_NORMS_PLUS_ONE,
        *decoders.PRE_NORMS_PLUS_ONE,
        *decoders.feed_forward(only=_leads),
        *decoders.experts(_EXPERTS, names=("w1", "w3", "w2"), only=_follows),
        *decoders.shared_experts(f"{_EXPERTS}.shared_experts", only=_follows),
        Rule(
            f"layers.{{n}}.{_EXPERTS}.e_score_correction_bias",
            "blk.{n}.exp_probs_b.bias",
            only=_follows,
        ),
        *(
            Rule(
                f"layers.{{n}}.self_attn.index_{name}.weight",
                f"blk.{{n}}.indexer.{name}.weight",
                plus_one if name.endswith("norm") else None,
                optional=True,
                keep=True,
            )
            for name in ("q_proj", "k_proj", "q_norm", "k_norm")
        ),
    ),
    drop=(*decoders.OTHER_PARTS, "patch_merge_mlp.**", "mtp.**"),
    defaults={
        "dense_intermediate_size": 12288,
        "shared_intermediate_size": 3072,
        "routed_scaling_factor": 2.0,
        "index_n_heads": 4,
        "index_head_dim": 128,
        "index_topk_blocks": 16,
        "index_block_size": 128,
        "index_local_blocks": 1,
    },
    check=checks.all_of(
        checks.only_scalings(), checks.only_values(swiglu_alpha=SLOPE, swiglu_limit=LIMIT)
    ),
    heads=(LLAMA_CPP,),
)
