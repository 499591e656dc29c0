"""Tiny configurations of text encoders, by family; those in `LARGE` are wider."""

from transformers import (
    BertConfig,
    EuroBertConfig,
    Gemma3TextConfig,
    JinaEmbeddingsV3Config,
    ModernBertConfig,
    NomicBertConfig,
)

SIZES = {
    "hidden_size": 64,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "intermediate_size": 96,
    "max_position_embeddings": 128,
}
GEMMA = {
    "num_key_value_heads": 2,
    "head_dim": 32,
    "query_pre_attn_scalar": 32,
    "sliding_window": 16,
    "use_bidirectional_attention": True,
}
# Bases so small that positions within a short text differ clearly.
GEMMA_ROPES = {
    "full_attention": {"rope_type": "linear", "rope_theta": 5000.0, "factor": 4.0},
    "sliding_attention": {"rope_type": "default", "rope_theta": 100.0},
}
MODERN_ROPES = {
    "full_attention": {"rope_type": "default", "rope_theta": 300.0},
    "sliding_attention": {"rope_type": "default", "rope_theta": 100.0},
}
ALTERNATING = ["sliding_attention", "full_attention", "sliding_attention"]
ENCODERS = {
    "bert": BertConfig(**SIZES),
    "bert_without_segments": BertConfig(**SIZES, type_vocab_size=1),
    "eurobert": EuroBertConfig(**SIZES, num_key_value_heads=2),
    "gemma_embedding": Gemma3TextConfig(**SIZES | GEMMA | {"num_hidden_layers": 7}),
    "gemma_embedding_with_every_other_layer_full": Gemma3TextConfig(
        **SIZES | GEMMA | {"sliding_window": 9},
        layer_types=ALTERNATING,
        rope_parameters=GEMMA_ROPES,
    ),
    "jina_bert_v3": JinaEmbeddingsV3Config(**SIZES),
    "modern_bert": ModernBertConfig(**SIZES | {"num_hidden_layers": 4}, local_attention=16),
    "modern_bert_of_granite": ModernBertConfig(
        **SIZES,
        local_attention=18,
        hidden_activation="silu",
        layer_types=ALTERNATING,
        rope_parameters=MODERN_ROPES,
    ),
    "nomic_bert": NomicBertConfig(**SIZES),
}
_WIDE = SIZES | {"hidden_size": 256, "intermediate_size": 256}
LARGE = {
    "bert": BertConfig(**_WIDE),
    "eurobert": EuroBertConfig(**_WIDE),
    "gemma_embedding": Gemma3TextConfig(**_WIDE | GEMMA),
    "jina_bert_v3": JinaEmbeddingsV3Config(**_WIDE),
    "modern_bert": ModernBertConfig(**_WIDE, local_attention=16),
    "nomic_bert": NomicBertConfig(**_WIDE),
}
