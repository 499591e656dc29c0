"""NomicBERT: conversion of text model checkpoints to GGUF."""

from model_zoo.convert import encoders
from model_zoo.convert.configuration import Configuration
from model_zoo.convert.mapping import Conversion
from model_zoo.models.nomic_bert.text import DEFAULT_BASE, DEFAULT_EPS
from runtime.errors import UnsupportedModelError


def _no_experts(config: Configuration) -> None:
    """Refuses experts, whose sum has a bias in checkpoints; GGUF files have no tensor for it, and
    llama.cpp's converter leaves it out."""
    if config.get("moe_every_n_layers"):
        raise UnsupportedModelError(
            f"{config.path}: has experts with a bias, which files cannot express; files of "
            "llama.cpp's converter, without the bias, are served."
        )


CONVERSION = Conversion(
    serves=("NomicBertModel",),
    architecture="nomic-bert",
    keys=encoders.ROTATED_KEYS,
    rules=encoders.joined_rules("attn", {"ffn_up": "fc11", "ffn_gate": "fc12", "ffn_down": "fc2"}),
    roots=("bert.",),
    drop=encoders.UNUSED,
    spellings=encoders.GPT2_SPELLINGS,
    defaults={"layer_norm_eps": DEFAULT_EPS, "rope_theta": DEFAULT_BASE},
    check=_no_experts,
)
