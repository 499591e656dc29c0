"""The rows of models for which `transformers` has no class of their own in the table of text
families."""

from collections.abc import Mapping

from transformers import LlamaConfig

from tests.families.author_checkpoints import save_internlm2
from tests.families.text_family import SIZES, TIED, CompleteFile, TextFamily, rope

FAMILIES: Mapping[str, TextFamily] = {
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
