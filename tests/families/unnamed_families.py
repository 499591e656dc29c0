"""The rows of models for which `transformers` has no class of their own in the table of text
families."""

from collections.abc import Mapping

from transformers import LlamaConfig

from tests.families.author_checkpoints import save_exaone, save_internlm2
from tests.families.text_family import (
    LLAMA3_ROPE,
    SIZES,
    TIED,
    CompleteFile,
    TextFamily,
    rope,
)

FAMILIES: Mapping[str, TextFamily] = {
    "exaone": TextFamily(
        LlamaConfig,
        SIZES | rope(1e6) | {"rms_norm_eps": 1e-5},
        {"plain": {}, "tied_with_llama3_rope": TIED | {"rope_parameters": LLAMA3_ROPE}},
        options={"save": save_exaone},
        files=(CompleteFile(optional_keys="attention.key_length attention.value_length"),),
    ),
    "internlm2": TextFamily(
        LlamaConfig,
        SIZES | rope(1e6) | {"rms_norm_eps": 1e-5},
        {"plain": {}, "tied": TIED},
        options={"save": save_internlm2},
        files=(
            CompleteFile(
                optional_keys="""
                    attention.key_length attention.value_length rope.freq_base
                    attention.layer_norm_rms_epsilon
                """
            ),
        ),
    ),
}
