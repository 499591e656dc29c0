"""Tiny random llama models as GGUF files, each with its `transformers` twin, for every test.

`write_tiny_llama(path)` is the way in. The file has a real byte-level BPE tokenizer, trained on the
spot, and a ChatML template; the returned twin has the weights exactly as the file rounds them, so
that it is the reference for any type of weights.
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import torch
from tokenizers import AddedToken, Regex, Tokenizer, decoders, pre_tokenizers, trainers
from tokenizers.models import BPE
from transformers import LlamaConfig, LlamaForCausalLM

from runtime.quant import block_type
from tests.block_samples import random_blocks, set_scales

END_OF_TEXT, START, END = "<|endoftext|>", "<|im_start|>", "<|im_end|>"
CONTROL_TOKENS = (END_OF_TEXT, START, END)
CHAT_TEMPLATE = (
    "{% for message in messages %}"
    "{{ '<|im_start|>' + message['role'] + '\\n' + message['content'] + '<|im_end|>\\n' }}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)
# Types that the `gguf` package can quantise to; of the others, random blocks are written.
QUANTIZED = "F32 F16 BF16 Q8_0 Q4_0 Q4_1 Q5_0 Q5_1 MXFP4 TQ1_0 TQ2_0".split()
# Of values from which a minimum is taken.
_MIDDLES = {"Q2_K": 1.5, "Q4_K": 7.5, "Q5_K": 15.5}
_DEFAULT_ROPE = {"rope_type": "default", "rope_theta": 10000.0}
_LLAMA3_ROPE = {
    "rope_type": "llama3",
    "rope_theta": 10000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
_LINEAR_ROPE = {"rope_type": "linear", "rope_theta": 10000.0, "factor": 2.0}


@dataclass(frozen=True)
class TinyLlama:
    """The sizes of a tiny llama. `padding_rows`: embedding rows that no token of the file has."""

    hidden: int = 64
    layers: int = 2
    heads: int = 4
    kv_heads: int = 2
    head_dim: int = 16
    feed_forward: int = 96
    context: int = 512
    tied: bool = False
    biases: bool = False
    padding_rows: int = 0
    rope: Mapping[str, Any] = field(default_factory=lambda: _DEFAULT_ROPE)


CONFIGS: Mapping[str, TinyLlama] = {
    "gqa": TinyLlama(),
    "mha": TinyLlama(kv_heads=4),
    "tied": TinyLlama(tied=True),
    "llama3_rope": TinyLlama(rope=_LLAMA3_ROPE),
    "linear_rope": TinyLlama(rope=_LINEAR_ROPE),
    "wide_heads": TinyLlama(head_dim=32),
    "biases": TinyLlama(biases=True),
    "padded_vocabulary": TinyLlama(padding_rows=5),
    "rows_of_256": TinyLlama(hidden=256, heads=8, kv_heads=2, head_dim=32, feed_forward=256),
}


def write_tiny_llama(
    path: Path | str,
    *,
    config: str | TinyLlama = "gqa",
    type: str = "F32",
    overrides: Mapping[str, str] | None = None,
    seed: int = 0,
) -> LlamaForCausalLM:
    """Write a random llama to `path`; returns its float32 eager twin in `transformers`.

    `config`: a name in CONFIGS or sizes. `type`: GGUF type of the matrices, where
    their rows are multiples of its blocks, for the large ones as in "rows_of_256"; not NVFP4.
    `overrides`: name of a tensor without block and suffix ("attn_v", "output") -> another type.
    """
    sizes = CONFIGS[config] if isinstance(config, str) else config
    model = _random_model(sizes, seed)
    random = np.random.default_rng(seed)
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_name("tiny")
    writer.add_license("apache-2.0")
    _write_sizes(writer, sizes, model.config.vocab_size)
    _write_tokenizer(writer)
    for name, parameter in _gguf_names(model).items():
        short = name.removesuffix(".weight").rpartition(".")[2]
        chosen = (overrides or {}).get(short, type) if parameter.ndim == 2 else "F32"
        heads = {"attn_q": sizes.heads, "attn_k": sizes.kv_heads}.get(name.split(".")[-2])
        _write_tensor(writer, name, parameter, chosen, heads, random)
    if sizes.rope["rope_type"] == "llama3":
        writer.add_tensor("rope_freqs.weight", _llama3_factors(sizes))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return model


@cache
def tiny_tokenizer() -> Tokenizer:
    """The tokenizer of every tiny model, as its own library runs it."""
    tokenizer = Tokenizer(BPE())
    expression = (
        r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*"
        r"|\s*[\r\n]+|\s+(?!\S)|\s+"
    )
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(expression), "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    trainer = trainers.BpeTrainer(vocab_size=320, initial_alphabet=alphabet, show_progress=False)
    words = "the quick brown fox jumps over the lazy dog and says hello to the user and assistant"
    tokenizer.train_from_iterator([words, "user system assistant hello there"] * 4, trainer)
    tokenizer.add_special_tokens([AddedToken(text, special=True) for text in CONTROL_TOKENS])
    return tokenizer


def _random_model(sizes: TinyLlama, seed: int) -> LlamaForCausalLM:
    """Weights large enough that every part of the computation shows in the logits."""
    config = LlamaConfig(
        vocab_size=tiny_tokenizer().get_vocab_size() + sizes.padding_rows,
        hidden_size=sizes.hidden,
        intermediate_size=sizes.feed_forward,
        num_hidden_layers=sizes.layers,
        num_attention_heads=sizes.heads,
        num_key_value_heads=sizes.kv_heads,
        head_dim=sizes.head_dim,
        max_position_embeddings=sizes.context,
        rms_norm_eps=1e-5,
        rope_parameters=dict(sizes.rope),
        tie_word_embeddings=sizes.tied,
        attention_bias=sizes.biases,
        mlp_bias=sizes.biases,
        attn_implementation="eager",
    )
    model = LlamaForCausalLM(config).eval().requires_grad_(False)
    generator = torch.Generator().manual_seed(seed)
    for name, parameter in model.named_parameters():
        noise = torch.randn(parameter.shape, generator=generator)
        if parameter.ndim == 2:
            parameter.copy_(noise * 1.5 * parameter.shape[1] ** -0.5)
        else:
            parameter.copy_(noise * 0.3 + (0.0 if name.endswith("bias") else 1.0))
    return model


def _gguf_names(model: LlamaForCausalLM) -> dict[str, torch.Tensor]:
    """GGUF name -> parameter, in the order of the file."""
    modules = {
        "attn_norm": "input_layernorm",
        "attn_q": "self_attn.q_proj",
        "attn_k": "self_attn.k_proj",
        "attn_v": "self_attn.v_proj",
        "attn_output": "self_attn.o_proj",
        "ffn_norm": "post_attention_layernorm",
        "ffn_gate": "mlp.gate_proj",
        "ffn_up": "mlp.up_proj",
        "ffn_down": "mlp.down_proj",
    }
    parameters = dict(model.named_parameters())
    named = {"token_embd.weight": parameters["model.embed_tokens.weight"]}
    for block in range(model.config.num_hidden_layers):
        for short, module in modules.items():
            for kind in ("weight", "bias"):
                source = f"model.layers.{block}.{module}.{kind}"
                if source in parameters:
                    named[f"blk.{block}.{short}.{kind}"] = parameters[source]
    named["output_norm.weight"] = parameters["model.norm.weight"]
    if "lm_head.weight" in parameters:
        named["output.weight"] = parameters["lm_head.weight"]
    return named


def _write_tensor(
    writer: gguf.GGUFWriter,
    name: str,
    parameter: torch.Tensor,
    type: str,
    heads: int | None,
    random: np.random.Generator,
) -> None:
    """Write the parameter and set it to what the file holds. `heads`: its rows are rotated."""
    kind = gguf.GGMLQuantizationType[type]
    rows = parameter.numpy()
    rows = _interleaved(rows, heads) if heads else rows
    stored = (
        gguf.quants.quantize(rows.copy(), kind)
        if type in QUANTIZED
        else _random_blocks(rows.shape, type, random)
    )
    writer.add_tensor(name, stored, raw_dtype=kind)
    read = gguf.quants.dequantize(stored, kind).reshape(rows.shape)
    parameter.copy_(torch.from_numpy(_half_split(read, heads) if heads else read.copy()))


def _interleaved(rows: np.ndarray, heads: int) -> np.ndarray:
    """transformers rotates row j with row j + d/2 of a head; a llama file wants 2j and 2j + 1."""
    halves = rows.reshape(heads, 2, rows.shape[0] // heads // 2, *rows.shape[1:])
    return np.ascontiguousarray(halves.swapaxes(1, 2)).reshape(rows.shape)


def _half_split(rows: np.ndarray, heads: int) -> np.ndarray:
    pairs = rows.reshape(heads, rows.shape[0] // heads // 2, 2, *rows.shape[1:])
    return np.ascontiguousarray(pairs.swapaxes(1, 2)).reshape(rows.shape)


def _random_blocks(shape: tuple[int, ...], type: str, random: np.random.Generator) -> np.ndarray:
    """[rows, row bytes] uint8: valid blocks, whose weights deviate by about 1.5 / sqrt(in)."""
    kind = block_type(type)
    blocks = random_blocks(kind, (shape[0], shape[1] // kind.block_elements), random=random)
    _set_scales(blocks, type, 1.0)
    deviation = gguf.quants.dequantize(blocks, gguf.GGMLQuantizationType[type]).std()
    _set_scales(blocks, type, 1.5 * shape[1] ** -0.5 / deviation)
    return blocks


def _set_scales(data: np.ndarray, type: str, d: float) -> None:
    """The half of each block, and where there is a minimum, its half such that weights are even."""
    set_scales(data, block_type(type), d, minimum=d * _MIDDLES.get(type, 0.0))


def _llama3_factors(sizes: TinyLlama) -> np.ndarray:
    """[head_dim / 2] float32: divisors of the rotary frequencies, as converters compute them."""
    rope = sizes.rope
    low, high = rope["low_freq_factor"], rope["high_freq_factor"]
    exponents = np.arange(0, sizes.head_dim, 2) / sizes.head_dim
    wavelengths = 2 * np.pi * rope["rope_theta"] ** exponents
    turns = rope["original_max_position_embeddings"] / wavelengths
    smooth = np.clip((turns - low) / (high - low), 0, 1)
    return (1 / ((1 - smooth) / rope["factor"] + smooth)).astype(np.float32)


def _write_sizes(writer: gguf.GGUFWriter, sizes: TinyLlama, rows: int) -> None:
    writer.add_block_count(sizes.layers)
    writer.add_context_length(sizes.context)
    writer.add_embedding_length(sizes.hidden)
    writer.add_feed_forward_length(sizes.feed_forward)
    writer.add_head_count(sizes.heads)
    writer.add_head_count_kv(sizes.kv_heads)
    writer.add_key_length(sizes.head_dim)
    writer.add_value_length(sizes.head_dim)
    writer.add_rope_dimension_count(sizes.head_dim)
    writer.add_rope_freq_base(sizes.rope["rope_theta"])
    if sizes.rope["rope_type"] == "linear":
        writer.add_rope_scaling_type(gguf.RopeScalingType.LINEAR)
        writer.add_rope_scaling_factor(sizes.rope["factor"])
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_vocab_size(rows)


def _write_tokenizer(writer: gguf.GGUFWriter) -> None:
    tokenizer = tiny_tokenizer()
    merges = json.loads(tokenizer.to_str())["model"]["merges"]
    tokens = [tokenizer.id_to_token(id) for id in range(tokenizer.get_vocab_size())]
    control, normal = gguf.TokenType.CONTROL, gguf.TokenType.NORMAL
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("qwen2")
    writer.add_token_list(tokens)
    writer.add_token_types([control if text in CONTROL_TOKENS else normal for text in tokens])
    writer.add_token_merges([" ".join(pair) for pair in merges])
    writer.add_bos_token_id(tokens.index(END_OF_TEXT))
    writer.add_eos_token_id(tokens.index(END))
    writer.add_add_bos_token(False)
    writer.add_chat_template(CHAT_TEMPLATE)
