"""Gemma 3 and EmbeddingGemma: conversion of text model checkpoints to GGUF."""

from model_zoo.convert import checks, decoders
from model_zoo.convert.mapping import LLAMA_CPP, OLLAMA, Conversion, Key
from model_zoo.convert.sentence_transformer import DENSE_KEYS, DENSE_RULES

CONVERSION = Conversion(
    serves=("Gemma3ForCausalLM", "Gemma3ForConditionalGeneration"),
    architecture="gemma3",
    keys=(
        *decoders.SIZES,
        *decoders.HEAD_SIZES,
        Key("attention.sliding_window", "sliding_window"),
        Key("attention.sliding_window_pattern", decoders.unusual_windows(6)),
        Key("rope.freq_base", decoders.rope_base, flavours=(LLAMA_CPP,)),
        Key("rope.freq_base_swa", decoders.local_rope_base, flavours=(LLAMA_CPP,)),
        Key("rope.global.freq_base", decoders.rope_base, flavours=(OLLAMA,)),
        Key("rope.local.freq_base", decoders.local_rope_base, flavours=(OLLAMA,)),
        *decoders.LINEAR_SCALING,
        Key("final_logit_softcapping", "final_logit_softcapping", optional=True, of=float),
    ),
    rules=(
        *decoders.EMBEDDINGS_PLUS_ONE,
        *decoders.attention(),
        *decoders.feed_forward(),
        *decoders.NORMS_PLUS_ONE,
        *decoders.HEAD_NORMS_PLUS_ONE,
    ),
    drop=decoders.OTHER_PARTS,
    # Settings that the files of the larger models omit.
    defaults={
        "vocab_size": 262208,
        "num_attention_heads": 8,
        "num_key_value_heads": 4,
        "head_dim": 256,
        "max_position_embeddings": 131072,
        "rms_norm_eps": 1e-6,
        "rope_theta": 1000000.0,
        "sliding_window": 4096,
        "query_pre_attn_scalar": 256,
        "tie_word_embeddings": True,
    },
    check=checks.all_of(checks.only_scalings("linear"), checks.known_query_scale(62)),
)

EMBEDDING = Conversion(
    serves=("Gemma3TextModel",),
    architecture={LLAMA_CPP: "gemma-embedding", OLLAMA: "gemma3"},
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
    check=checks.all_of(
        checks.bidirectional, checks.only_scalings("linear"), checks.known_query_scale()
    ),
)
