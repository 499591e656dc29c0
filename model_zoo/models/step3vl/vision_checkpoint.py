"""Step 3 VL and Step 3.7 Flash: conversion of vision checkpoints to GGUF."""

from model_zoo.convert import checks, towers
from model_zoo.convert.configuration import Configuration
from model_zoo.convert.mapping import LLAMA_CPP, Conversion, Key, Rule
from model_zoo.images.normalise import CLIP
from model_zoo.layers.rope_scaling import DEFAULT_BASE
from model_zoo.models.step3vl.image_processor import MERGED, tile_side
from model_zoo.models.step3vl.vision import EDGE_KEY, EPS, LONGEST_EDGE, MERGED_KEY
from runtime.errors import UnsupportedModelError

# Published checkpoints state the width of the feed-forward as a multiple of the hidden size.
_MULTIPLE = 8960 / 1536


def _feed_forward(config: Configuration) -> int:
    stated = config.get("intermediate_size")
    if stated is not None:
        return int(stated)
    return int(config.require_size("hidden_size") * float(config.get("mlp_ratio", _MULTIPLE)))


def _usual_windows(config: Configuration) -> None:
    """Checks that windows have the side that readers assume."""
    usual = tile_side(config.require_size("image_size"), config.require_size("patch_size"))
    stated = towers.preprocessing(config).get("patch_size", usual)
    if stated != usual:
        raise UnsupportedModelError(
            f"{config.path}: its image processor has {stated} as `patch_size`, where files of this "
            f"architecture mean {usual}."
        )


_MODULES = (
    ("ln_1", "ln1"),
    ("attn.out_proj", "attn_out"),
    ("ln_2", "ln2"),
    ("mlp.c_fc", "ffn_up"),
    ("mlp.c_proj", "ffn_down"),
)
_LAYER = "transformer.resblocks.{n}"


VISION = Conversion(
    serves=("StepVLForConditionalGeneration", "Step3p7ForConditionalGeneration"),
    architecture={LLAMA_CPP: "clip"},
    keys=(
        *(key for key in towers.SIZES if key.name != "vision.feed_forward_length"),
        Key("vision.feed_forward_length", _feed_forward),
        towers.IMAGE_SIZE,
        *towers.clip("step3vl", CLIP, eps="layer_norm_eps"),
        Key(MERGED_KEY, lambda c: MERGED),
        Key(EDGE_KEY, lambda c: towers.preprocessing(c).get("max_image_size", LONGEST_EDGE)),
    ),
    rules=(
        Rule("conv1.weight", "v.patch_embd.weight"),
        Rule("positional_embedding", "v.position_embd.weight", keep=True),
        Rule("ln_pre.*", "v.pre_ln.*"),
        *(
            Rule(f"{_LAYER}.attn.in_proj_{part}", f"v.blk.{{n}}.attn_qkv.{part}")
            for part in ("weight", "bias")
        ),
        *towers.layers(_LAYER, _MODULES),
        *(Rule(f"{_LAYER}.ls_{part}.gamma", f"v.blk.{{n}}.ls{part}.weight") for part in (1, 2)),
        *(Rule(f"vit_downsampler{number}.*", f"mm.{number - 1}.*") for number in (1, 2)),
        Rule("vit_large_projector.*", "mm.model.fc.*"),
    ),
    roots=towers.roots("vision_model"),
    drop=towers.TEXT,
    defaults={"image_size": 728, "patch_size": 14, "layer_norm_eps": EPS},
    spellings={
        "hidden_size": "width",
        "num_hidden_layers": "layers",
        "num_attention_heads": "heads",
    },
    check=checks.all_of(
        towers.known_setting("hidden_act", "quick_gelu"),
        towers.known_setting("num_channels", 3),
        towers.known_setting("use_cls_token", False),
        towers.known_setting("use_ln_post", False),
        towers.known_rope_base(DEFAULT_BASE),
        towers.known_of_model("understand_projector_stride", 2),
        _usual_windows,
    ),
)
