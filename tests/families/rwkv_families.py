"""The row of RWKV 7 in the table of text families."""

from tests.families.rwkv_twin import RWKV7Config, RWKV7Maker
from tests.families.text_family import CompleteFile, TextFamily

RWKV7 = TextFamily(
    RWKV7Config,
    {
        "hidden_size": 64,
        "num_hidden_layers": 3,
        "intermediate_size": 96,
        "head_dim": 16,
        "norm_eps": 1e-5,
        "decay_low_rank_dim": 12,
        "a_low_rank_dim": 10,
        "v_low_rank_dim": 6,
        "gate_low_rank_dim": 14,
        "tie_word_embeddings": False,
    },
    {"plain": {}},
    wide={"hidden_size": 256, "intermediate_size": 256, "head_dim": 64},
    options={"maker": RWKV7Maker},
    refused=[({"wkv.head_size": 24}, "is 24, which does not divide 64")],
    files=(
        CompleteFile(
            optional_keys="attention.head_count",
            unused_tensors=" ".join(f"blk.0.time_mix_v{part}.weight" for part in range(3)),
        ),
    ),
)
