"""The parts of the tables that encoders for embeddings share."""

from collections.abc import Mapping
from types import MappingProxyType

from model_zoo.conversion.configuration import Configuration, optional_json
from model_zoo.conversion.mapping import Key, Rule

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
# `pooling_type` of files, by the settings of a pooling module.
_POOLINGS = {
    "pooling_mode_mean_tokens": 1,
    "pooling_mode_cls_token": 2,
    "pooling_mode_lasttoken": 3,
}


def pooling(config: Configuration) -> int | None:
    """How token vectors become one: 1 mean, 2 the first, 3 the last; None where no module says."""
    folder = config.path.parent
    for settings in sorted(folder.glob("*_Pooling/config.json")):
        stated = optional_json(settings)
        for name, kind in _POOLINGS.items():
            if stated.get(name):
                return kind
    return None


KEYS = (
    Key("block_count", "num_hidden_layers"),
    Key("context_length", "max_position_embeddings"),
    Key("embedding_length", "hidden_size"),
    Key("feed_forward_length", "intermediate_size"),
    Key("attention.head_count", "num_attention_heads"),
    Key("vocab_size", "vocab_size"),
    Key("attention.causal", lambda c: False),
    Key("pooling_type", pooling),
    Key("tokenizer.ggml.token_type_count", "type_vocab_size", optional=True),
)
EMBEDDINGS = (
    Rule("embeddings.word_embeddings.weight", "token_embd.weight"),
    Rule("embeddings.token_type_embeddings.weight", "token_types.weight", optional=True),
)
