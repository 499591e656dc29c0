"""Idefics 3 and SmolVLM: conversion of vision checkpoints to GGUF."""

from model_zoo.convert import checks, towers
from model_zoo.convert.configuration import Configuration
from model_zoo.convert.mapping import LLAMA_CPP, Conversion, Key, Rule
from model_zoo.images.normalise import STANDARD
from model_zoo.models.idefics3.vision import EDGE_KEY, EPS, SHUFFLED

# The edge that the family's processors scale to by default.
LONGEST_EDGE = 4 * 364


def _shuffle(config: Configuration) -> int:
    return int(config.model.get("scale_factor", SHUFFLED))


VISION = Conversion(
    serves=("Idefics3ForConditionalGeneration", "SmolVLMForConditionalGeneration"),
    architecture={LLAMA_CPP: "clip"},
    keys=(
        *towers.SIZES,
        towers.IMAGE_SIZE,
        *towers.clip("idefics3", STANDARD, eps="layer_norm_eps"),
        Key("use_gelu", lambda c: True),
        Key("vision.projector.scale_factor", _shuffle),
        Key(EDGE_KEY, lambda c: towers.longest_edge(c) or LONGEST_EDGE),
    ),
    rules=(
        Rule("embeddings.patch_embedding.*", "v.patch_embd.*"),
        Rule("embeddings.position_embedding.weight", "v.position_embd.weight"),
        *towers.layers("encoder.layers.{n}", towers.CLIP_MODULES),
        Rule("post_layernorm.*", "v.post_ln.*"),
        Rule("connector.modality_projection.proj.weight", "mm.model.fc.weight"),
    ),
    roots=towers.roots("vision_model"),
    drop=(*towers.TEXT, "text_model.**"),
    defaults={
        "hidden_size": 1152,
        "intermediate_size": 3072,
        "num_hidden_layers": 12,
        "num_attention_heads": 16,
        "image_size": 224,
        "patch_size": 32,
        "layer_norm_eps": EPS,
    },
    check=checks.all_of(
        towers.known_setting("hidden_act", "gelu_pytorch_tanh"),
        towers.known_setting("num_channels", 3),
        towers.same_side("max_image_size"),
        towers.known_processing("do_resize", True),
        towers.known_processing("do_image_splitting", True),
    ),
)
