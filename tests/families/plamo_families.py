"""The rows of PLaMo in the table of text families."""

from collections.abc import Mapping

from tests.families.plamo_twins import (
    Plamo1Config,
    Plamo2Config,
    Plamo2Maker,
    Plamo3Config,
    Plamo3Maker,
    PlamoMaker,
)
from tests.families.text_family import SIZES, TIED, WIDE, CompleteFile, TextFamily, Variant

SHARED = SIZES | {"rms_norm_eps": 1e-6, "tie_word_embeddings": False}
# Layers with and without a window of the attending layers of a step.
PLAMO2 = SHARED | {
    "num_hidden_layers": 3,
    "hidden_size_per_head": 24,
    "attention_window_size": 8,
    "full_attention_idx": [],
    "mamba_step": 2,
    "mamba_d_state": 16,
    "mamba_d_conv": 4,
    "mamba_num_heads": 6,
}
PLAMO3 = SHARED | {
    "num_hidden_layers": 3,
    "head_dim": 24,
    "window_size": 9,
    "sliding_window_pattern": 3,
    "rope_theta": 1e6,
    "rope_local_theta": 10000,
}

FAMILIES: Mapping[str, TextFamily] = {
    "plamo": TextFamily(
        Plamo1Config,
        SHARED | {"num_attention_heads": 6, "hidden_size": 96, "n_shared_head": 3},
        {"plain": {}},
        wide=WIDE | {"num_attention_heads": 4, "n_shared_head": 2},
        options={"maker": PlamoMaker},
        files=(CompleteFile(),),
    ),
    "plamo2": TextFamily(
        Plamo2Config,
        PLAMO2,
        {
            "plain": {},
            "attention_last_without_window_tied": TIED
            | {"num_hidden_layers": 2, "mamba_step": 4, "full_attention_idx": [1]},
        },
        wide=WIDE | {"hidden_size_per_head": 64, "mamba_num_heads": 4},
        options={"maker": Plamo2Maker},
        variants={
            "heads_as_in_llama_cpp": Variant(keys={"attention.head_count": [0, 4, 0]}),
        },
        effective_keys={"attention.sliding_window": 12},
        refused=(
            ({"ssm.time_step_rank": 5}, "is 5; it must divide 144"),
            ({"attention.head_count": [0, 4]}, "has 2 entries"),
            ({"attention.head_count": [0, 0, 0]}, "counts heads for no layer"),
        ),
        files=(CompleteFile(optional_keys="attention.sliding_window ssm.group_count"),),
    ),
    "plamo3": TextFamily(
        Plamo3Config,
        PLAMO3,
        {"plain": {}, "tied": TIED | {"num_hidden_layers": 2, "sliding_window_pattern": 2}},
        wide=WIDE | {"head_dim": 64},
        options={"maker": Plamo3Maker},
        effective_keys={"rope.freq_base_swa": 100.0, "attention.sliding_window": 12},
        files=(
            CompleteFile(
                optional_keys="""
                    attention.sliding_window attention.sliding_window_pattern rope.freq_base_swa
                """
            ),
        ),
    ),
}
