"""EmbeddingGemma: conversion of checkpoints, with the matrices after pooling, to GGUF."""

from model_zoo.convert import checks, decoders
from model_zoo.convert.mapping import Conversion, Key
from model_zoo.convert.sentence_transformer import DENSE_KEYS, DENSE_RULES

CONVERSION = Conversion(
    serves=("Gemma3TextModel",),
    architecture="gemma-embedding",
    keys=(
        *decoders.SIZES,
        *decoders.HEAD_SIZES,
        # The whole window: `transformers` halves it when it reads the settings.
        Key("attention.sliding_window", "sliding_window"),
        Key("attention.sliding_window_pattern", decoders.unusual_windows(6)),
        Key("rope.freq_base", decoders.rope_base),
        Key("rope.freq_base_swa", decoders.local_rope_base),
        *decoders.LINEAR_SCALING,
        *DENSE_KEYS,
    ),
    rules=(
        decoders.EMBEDDINGS_PLUS_ONE[0],
        decoders.EMBEDDINGS_PLUS_ONE[1],
        *decoders.attention(),
        *decoders.feed_forward(),
        *decoders.NORMS_PLUS_ONE,
        *decoders.HEAD_NORMS_PLUS_ONE,
        *DENSE_RULES,
    ),
    drop=decoders.BUFFERS,
    check=checks.all_of(
        checks.bidirectional, checks.only_scalings("linear"), checks.known_query_scale()
    ),
)
