"""Tiny configurations of text encoders, by family; those in `LARGE` are wider."""

from transformers import BertConfig, NomicBertConfig

SIZES = {
    "hidden_size": 64,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "intermediate_size": 96,
    "max_position_embeddings": 128,
}
ENCODERS = {
    "bert": BertConfig(**SIZES),
    "bert_without_segments": BertConfig(**SIZES, type_vocab_size=1),
    "nomic_bert": NomicBertConfig(**SIZES),
}
LARGE = {
    name: type(config)(**(SIZES | {"hidden_size": 256, "intermediate_size": 256}))
    for name, config in ENCODERS.items()
}
