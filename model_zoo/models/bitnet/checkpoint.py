"""BitNet b1.58: conversion of text model checkpoints to GGUF."""

from dataclasses import replace

from torch import Tensor

from model_zoo.convert import checks, decoders
from model_zoo.convert.configuration import Configuration
from model_zoo.convert.mapping import Conversion, Key, Rule
from model_zoo.models.bitnet.text import CURVE, GATES
from runtime.errors import UnsupportedModelError


def ternary(config: Configuration, weight: Tensor) -> Tensor:
    """-1, 0 or 1 times the mean amount of the elements, as in each step of training (Ma et al.,
    "The Era of 1-bit LLMs", section 2)."""
    scale = weight.float().abs().mean().clamp(min=1e-5)
    return (weight.float() / scale).round().clamp(-1, 1) * scale


def _known_curve(config: Configuration) -> None:
    curve, known = config.require("hidden_act"), " and ".join(GATES)
    if curve not in GATES:
        raise UnsupportedModelError(
            f"{config.path}: `hidden_act` is {str(curve)[:40]}; {known} are supported."
        )


CONVERSION = Conversion(
    serves=("BitNetForCausalLM",),
    model_types=("bitnet",),
    architecture="bitnet",
    keys=(*decoders.KEYS, Key(CURVE, lambda c: str(c.require("hidden_act")))),
    rules=(
        *decoders.EMBEDDINGS,
        *(
            replace(rule, transform=ternary)
            for rule in (*decoders.attention(), *decoders.feed_forward())
        ),
        Rule("layers.{n}.self_attn.attn_sub_norm.weight", "blk.{n}.attn_sub_norm.weight"),
        Rule("layers.{n}.mlp.ffn_sub_norm.weight", "blk.{n}.ffn_sub_norm.weight"),
        *decoders.PRE_NORMS,
    ),
    check=checks.all_of(
        checks.only_scalings(), checks.only_values(attention_bias=False), _known_curve
    ),
)
