"""The rows of models with layer norms in the table of text families."""

from collections.abc import Mapping

from transformers import PhiConfig

from tests.families.text_family import SIZES, TIED, CompleteFile, TextFamily, rope

FAMILIES: Mapping[str, TextFamily] = {
    "phi2": TextFamily(
        PhiConfig,
        SIZES | {"num_key_value_heads": 4},
        {
            "plain": {},
            "other_rotation": rope(500.0, partial_rotary_factor=0.25) | TIED,
        },
        files=(
            CompleteFile(
                optional_keys="""
                    attention.head_count_kv rope.freq_base attention.key_length
                    attention.value_length
                """
            ),
        ),
    ),
}
