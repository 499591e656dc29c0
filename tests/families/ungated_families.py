"""The rows of models whose feed-forwards have no gate in the table of text families."""

from collections.abc import Mapping

from transformers import ApertusConfig, ArceeConfig, Jais2Config

from tests.families.text_family import (
    LLAMA3_ROPE,
    SIZES,
    TIED,
    YARN,
    CompleteFile,
    TextFamily,
    rope,
)

FAMILIES: Mapping[str, TextFamily] = {
    "apertus": TextFamily(
        ApertusConfig,
        SIZES | rope(12e6) | {"pad_token_id": None},
        {
            "plain": {},
            "llama3_rope": {"rope_parameters": LLAMA3_ROPE},
            "tied_with_biases": TIED | {"attention_bias": True, "num_key_value_heads": 4},
        },
        files=(CompleteFile(optional_keys="attention.key_length attention.value_length"),),
    ),
    "arcee": TextFamily(
        ArceeConfig,
        SIZES | rope(10000.0),
        {
            "plain": {},
            "yarn": YARN,
            "llama3_rope": {"rope_parameters": LLAMA3_ROPE},
            "tied_with_biases": TIED | {"attention_bias": True, "mlp_bias": True},
        },
        files=(CompleteFile(optional_keys="attention.key_length attention.value_length"),),
    ),
    "jais2": TextFamily(
        Jais2Config,
        SIZES | rope(500000.0) | {"pad_token_id": None},
        {
            "plain": {"head_dim": 16},
            "tied_without_biases": TIED
            | {"attention_bias": False, "mlp_bias": False, "num_key_value_heads": 4},
        },
        files=(CompleteFile(optional_keys="attention.key_length attention.value_length"),),
    ),
}
