"""The row of Muse Glimmer in the table of text families."""

from collections.abc import Mapping
from typing import Any

from transformers import MuseGlimmerConfig, MuseGlimmerTextConfig

from tests.families.text_family import SIZES, WIDE_HEADS, CompleteFile, TextFamily, rope

TINY_VISION = {
    "hidden_size": 16,
    "intermediate_size": 16,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "pos_emb_height": 4,
    "pos_emb_width": 4,
}


def muse_glimmer(**settings: Any) -> MuseGlimmerConfig:
    """`transformers` has no class for the text model with its head alone."""
    return MuseGlimmerConfig(
        text_config=MuseGlimmerTextConfig(**settings),
        vision_config=TINY_VISION,
        out_hidden_size=64,
        projector_hidden_size=16,
        image_token_id=100_000,  # no token of tests
        video_token_id=100_001,
    )


FAMILIES: Mapping[str, TextFamily] = {
    "muse-glimmer": TextFamily(
        muse_glimmer,
        SIZES
        | rope(500000.0)
        | {
            "num_hidden_layers": 5,  # the first and the last attend to all tokens
            "head_dim": 32,
            "sliding_window": 9,
            "final_logit_softcapping": 2.0,
            "qk_scale_factor": 1.7,
            "output_multiplier": 0.4,
        },
        {
            "plain": {},
            "window_in_the_last_layer": {
                "layer_types": ["full_attention", *["sliding_attention"] * 4],
                "layer_rope_theta": [0, *[500000.0] * 4],
                "num_key_value_heads": 1,
            },
        },
        wide=WIDE_HEADS,
        effective_keys={
            "attention.sliding_window": 10,
            "attention.sliding_window_pattern": 2,
            "final_logit_softcapping": 3.0,
            "logit_scale": 0.5,
        },
        files=(
            CompleteFile(
                "window_in_the_last_layer",
                optional_keys="final_logit_softcapping attention.sliding_window_pattern",
            ),
        ),
    ),
}
