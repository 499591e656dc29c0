"""The parts of the tables that encoders for embeddings share."""

from collections.abc import Mapping
from types import MappingProxyType

from model_zoo.convert.mapping import Key, Rule
from model_zoo.convert.pooling import POOLING

# Heads for training, and counters that old software stored.
UNUSED = (
    "pooler.**",
    "cls.**",
    "lm_head.**",
    "embeddings.position_ids",
    "encoder.layers.{n}.attn.rotary_emb.inv_freq",
)
# How some checkpoints of the family name their settings.
GPT2_SPELLINGS: Mapping[str, str] = MappingProxyType(
    {
        "num_hidden_layers": "n_layer",
        "max_position_embeddings": "n_positions",
        "hidden_size": "n_embd",
        "intermediate_size": "n_inner",
        "num_attention_heads": "n_head",
        "layer_norm_eps": "layer_norm_epsilon",
        "rope_theta": "rotary_emb_base",
    }
)

KEYS = (
    Key("block_count", "num_hidden_layers"),
    Key("context_length", "max_position_embeddings"),
    Key("embedding_length", "hidden_size"),
    Key("feed_forward_length", "intermediate_size"),
    Key("attention.head_count", "num_attention_heads"),
    Key("vocab_size", "vocab_size"),
    Key("attention.causal", lambda c: False),
    POOLING,
    Key("tokenizer.ggml.token_type_count", "type_vocab_size", optional=True),
)
EMBEDDINGS = (
    Rule("embeddings.word_embeddings.weight", "token_embd.weight"),
    Rule("embeddings.token_type_embeddings.weight", "token_types.weight", optional=True),
)
