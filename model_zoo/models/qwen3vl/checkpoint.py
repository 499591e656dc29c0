"""Qwen3-VL and its rerankers: conversion of text model checkpoints to GGUF."""

from torch import Tensor

from model_zoo.convert import checks, decoders
from model_zoo.convert.answering_rerankers import TASK, reranker_keys, reranker_rules
from model_zoo.convert.configuration import Configuration
from model_zoo.convert.mapping import LLAMA_CPP, OLLAMA, Conversion, Key, Rule, Transform
from model_zoo.convert.transforms import (
    first_half,
    second_half,
    transposed,
)
from model_zoo.models.qwen3vl.text import SECTIONS


def _deep_layers(config: Configuration) -> int:
    """The number of text layers that get features of intermediate vision layers."""
    return len((config.whole.get("vision_config") or {}).get("deepstack_visual_indexes") or ())


def _experts(name: str, target: str, size: str, half: Transform | None = None) -> Rule:
    """The rows of the gate precede those of up. `size`: the number of inputs.

    The authors' checkpoints store inputs before outputs; checkpoints that newer software saves do
    not.
    """

    def turned(config: Configuration, matrix: Tensor) -> Tensor:
        inward = matrix.shape[1] != config.require_size(size)
        rows = transposed(config, matrix) if inward else matrix
        return rows if half is None else half(config, rows)

    source = f"layers.{{n}}.mlp.experts.{name}"
    return Rule(source, f"blk.{{n}}.{target}.weight", turned, each=True)


_RERANKER = "qwen3-vl-reranker"
# The prompt that the authors of Qwen's rerankers with vision publish.
_PAIR = (
    f"{TASK}<Instruct>: Given a search query, retrieve relevant candidates that answer the query."
    "<Query>:{query}\n<Document>:{document}<|im_end|>\n<|im_start|>assistant\n"
)


_KEYS = (
    *decoders.KEYS,
    *decoders.YARN_SCALING,
    decoders.sections_key(SECTIONS),
    Key("n_deepstack_layers", _deep_layers, flavours=(LLAMA_CPP,)),
    Key(
        "mrope_sections",
        lambda c: decoders.rotated_sections(c, SECTIONS),
        flavours=(OLLAMA,),
    ),
)


_LAYERS = (
    *decoders.attention(),
    *decoders.PRE_NORMS,
    *decoders.HEAD_NORMS,
)


CONVERSION = Conversion(
    serves=("Qwen3VLForConditionalGeneration",),
    architecture="qwen3vl",
    keys=reranker_keys(_RERANKER, _PAIR, _KEYS),
    rules=(*reranker_rules(_RERANKER), *_LAYERS, *decoders.feed_forward()),
    drop=decoders.OTHER_PARTS,
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
        *decoders.EMBEDDINGS,
        *_LAYERS,
        Rule("layers.{n}.mlp.gate.weight", "blk.{n}.ffn_gate_inp.weight"),
        _experts("gate_up_proj", "ffn_gate_exps", "hidden_size", first_half),
        _experts("gate_up_proj", "ffn_up_exps", "hidden_size", second_half),
        _experts("down_proj", "ffn_down_exps", "moe_intermediate_size"),
    ),
    drop=decoders.OTHER_PARTS,
    defaults={"norm_topk_prob": True},
    check=checks.all_of(
        checks.only_scalings("yarn", "mrope"), checks.no_windows, checks.experts_everywhere
    ),
)
