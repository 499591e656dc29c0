"""Parts of conversion tables that encoders for embeddings share."""

from collections.abc import Mapping
from types import MappingProxyType

from model_zoo.convert.configuration import Configuration
from model_zoo.convert.decoders import SHARED_SIZES, rope_base
from model_zoo.convert.mapping import Key, Rule
from runtime.errors import UnsupportedModelError

# Training heads, and buffers that old software stored.
UNUSED = (
    "pooler.**",
    "cls.**",
    "lm_head.**",
    "embeddings.position_ids",
    "encoder.layers.{n}.attn.rotary_emb.inv_freq",
)
# GPT-2's names of settings, by the usual names.
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
    *SHARED_SIZES,
    Key("attention.causal", lambda c: False),
    Key("tokenizer.ggml.token_type_count", "type_vocab_size", optional=True),
)
RANKING_UNUSED = tuple(name for name in UNUSED if name != "pooler.**")
EMBEDDINGS = (
    Rule("embeddings.word_embeddings.weight", "token_embd.weight"),
    Rule("embeddings.token_type_embeddings.weight", "token_types.weight", optional=True),
)
# For models with rotary positions, and one matrix of queries, keys and values.
ROTATED_KEYS = (
    *KEYS,
    Key("attention.layer_norm_epsilon", "layer_norm_eps", of=float),
    Key("rope.freq_base", rope_base),
)


def joined_rules(attention: str, modules: Mapping[str, str]) -> tuple[Rule, ...]:
    """Their rules; attention, modules: names of the module of attention, and of those of the
    feed-forward by their target."""
    layers = {
        f"{attention}.Wqkv": "attn_qkv",
        f"{attention}.out_proj": "attn_output",
        "norm1": "attn_output_norm",
        **{f"mlp.{name}": target for target, name in modules.items()},
        "norm2": "layer_output_norm",
    }
    return (
        *EMBEDDINGS,
        Rule("emb_ln.*", "token_embd_norm.*"),
        *(
            Rule(f"encoder.layers.{{n}}.{source}.*", f"blk.{{n}}.{target}.*")
            for source, target in layers.items()
        ),
    )


def check_one_score(config: Configuration) -> None:
    """Refuses a classifier with several labels, which is not a reranker."""
    labels = config.get("id2label")
    count = len(labels) if isinstance(labels, Mapping) else config.get("num_labels", 2)
    if count != 1:
        raise UnsupportedModelError(
            f"{config.path}: classifies texts by {count} labels; rerankers have one."
        )
