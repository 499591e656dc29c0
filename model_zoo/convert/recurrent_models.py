"""Settings and tensors that models of recurrent layers alone share: Mamba and Mamba 2."""

from model_zoo.convert.mapping import OUTPUT, Key, Rule

CONTEXT = 1 << 20  # what llama.cpp's converter writes; the checkpoints state none

KEYS = (
    Key("block_count", "num_hidden_layers"),
    Key("context_length", lambda c: CONTEXT),
    Key("embedding_length", "hidden_size"),
    # llama.cpp requires them.
    Key("feed_forward_length", lambda c: 0),
    Key("attention.head_count", lambda c: 0),
    Key("attention.layer_norm_rms_epsilon", "layer_norm_epsilon", of=float),
    Key("vocab_size", "vocab_size"),
)
RULES = (
    Rule("embeddings.weight", "token_embd.weight"),
    Rule("norm_f.weight", "output_norm.weight"),
    Rule("lm_head.weight", OUTPUT),
    Rule("layers.{n}.norm.weight", "blk.{n}.attn_norm.weight"),
)
