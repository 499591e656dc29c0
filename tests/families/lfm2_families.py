"""The rows of the LFM2 models in the table of text families."""

from collections.abc import Mapping

from transformers import Lfm2Config

from tests.families.text_family import SIZES, WIDE, CompleteFile, TextFamily, rope

CONVOLUTION, ATTENTION = "conv", "full_attention"
LFM2 = (
    SIZES
    | rope(1e6)
    | {
        "num_hidden_layers": 4,
        "layer_types": [CONVOLUTION, CONVOLUTION, ATTENTION, CONVOLUTION],
        "block_multiple_of": 32,
    }
)

FAMILIES: Mapping[str, TextFamily] = {
    "lfm2": TextFamily(
        Lfm2Config,
        LFM2,
        {
            "plain": {},
            "attention_last": {"num_hidden_layers": 2, "layer_types": [CONVOLUTION, ATTENTION]},
            "wide_convolution": {"conv_L_cache": 7},
            "stated_width_and_own_head": {
                "block_auto_adjust_ff_dim": False,
                "tie_word_embeddings": False,
            },
            "multiplied_width": {"block_ffn_dim_multiplier": 1.3},
            "attention_everywhere": {"layer_types": None},
        },
        wide=WIDE | {"block_auto_adjust_ff_dim": False},
        refused=[
            ({"shortconv.l_cache": 1}, "l_cache"),
            ({"attention.head_count_kv": [0] * 4}, "head_count_kv"),
        ],
        files=(CompleteFile(optional_keys="attention.key_length attention.value_length"),),
    ),
}
