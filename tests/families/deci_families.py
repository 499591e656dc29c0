"""The row of Llama-Nemotron in the table of text families."""

from collections.abc import Mapping
from typing import Any

from transformers import LlamaConfig

from tests.families.deci_twin import DeciMaker
from tests.families.text_family import LLAMA3_ROPE, SIZES, CompleteFile, TextFamily, rope


def block(*, group: int | None = None, linear: bool = False, ffn: float | None = None) -> Any:
    """A layer's settings. group: heads that share a key head; without it, and with `linear`, a
    matrix takes the place of attention. ffn: multiple of the hidden size."""
    return {
        "attention": {
            "n_heads_in_group": group,
            "no_op": group is None and not linear,
            "replace_with_linear": linear,
        },
        "ffn": {"ffn_mult": ffn, "no_op": ffn is None, "replace_with_linear": False},
    }


def blocks(*each: Any) -> dict[str, Any]:
    return {"num_hidden_layers": len(each), "block_configs": each}


FAMILIES: Mapping[str, TextFamily] = {
    "deci": TextFamily(
        LlamaConfig,
        SIZES,
        {
            "plain": blocks(
                block(group=2, ffn=8.0),
                block(ffn=1.0),
                block(linear=True, ffn=1.0),
                block(),
                block(group=4, ffn=1.0),
            )
            | {"rope_parameters": LLAMA3_ROPE},
            "attention_without_feed_forward": blocks(block(group=2, ffn=1.0), block(group=1)),
            "key_heads_of_each_layer": {"num_key_value_heads_per_layer": [4, 1]} | rope(5e5),
        },
        wide=None,
        options={"maker": DeciMaker},
        refused=[
            ({"attention.head_count_kv": 0}, "key heads for no layer"),
            ({"attention.head_count": [0, 0, 4, 0, 4]}, "for a layer without heads"),
        ],
        files=(
            CompleteFile(
                "attention_without_feed_forward",
                optional_keys="attention.key_length attention.value_length rope.freq_base",
            ),
        ),
    ),
}
