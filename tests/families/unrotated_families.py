"""The rows of models with layers without rotation in the table of text families."""

from collections.abc import Mapping

from transformers import SmolLM3Config

from tests.families.text_family import SIZES, YARN, CompleteFile, TextFamily, rope

FAMILIES: Mapping[str, TextFamily] = {
    "smollm3": TextFamily(
        SmolLM3Config,
        SIZES | rope(5e6) | {"num_hidden_layers": 4, "pad_token_id": None},
        {
            "plain": {"tie_word_embeddings": False},
            "tied_with_biases_and_yarn": YARN | {"attention_bias": True},
        },
        files=(CompleteFile(optional_keys="attention.key_length attention.value_length"),),
    ),
}
