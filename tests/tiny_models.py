"""Tiny random models as GGUF files, each with its `transformers` twin, for every test.

Use `write_tiny(path, config)` for any architecture that can be converted: `transformers` makes the
model and saves it as a folder, which is converted. The file has a byte-level BPE tokenizer, trained
on the spot, and a ChatML template. `write_tiny_llama` supports every type of weights; its twin has
exactly the weights that the file rounds to, so that it is the reference for all types.
"""

import copy
import tempfile
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import cache, lru_cache
from math import prod
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import torch
from tokenizers import AddedToken, Regex, Tokenizer, decoders, pre_tokenizers, trainers
from tokenizers.models import BPE
from torch import nn
from transformers import (
    AutoModel,
    AutoModelForCausalLM,
    AutoModelForImageTextToText,
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedConfig,
    PreTrainedTokenizerFast,
)
from transformers.utils import logging

from model_zoo.convert.convert_folder import convert
from runtime.quant.block_types import block_type
from tests.block_samples import random_blocks, set_scales
from tests.gguf_files import Reader, finish

logging.disable_progress_bar()

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

# Saves a model in a folder. Where `transformers` has no class for a family but one that computes
# the same, it changes names and settings to those of the family's authors.
Save = Callable[[Any, Path], None]


def save_pretrained(model: Any, folder: Path) -> None:
    """As `transformers` does."""
    model.save_pretrained(folder)


def write_tiny(
    path: Path | str,
    config: PreTrainedConfig,
    *,
    seed: int = 0,
    type: str = "f32",
    flavour: str = "llama.cpp",
    padding_rows: int = 0,
    maker: Any = None,
    save: Save = save_pretrained,
) -> Any:
    """Write a random model of that configuration to `path`, and its vision model, if that is a file
    of its own, beside it; returns its float32 eager twin.

    The vocabulary is the tiny tokenizer's and `padding_rows` more, whatever `config` says. With
    types other than f32 the twin keeps what the file rounds. `maker`: an Auto class of
    `transformers`; by default the first that knows the configuration of those for pictures and
    text, for text, and for anything: `AutoModel` must be named for encoders. `save`: see `Save`.
    """
    recipe = Recipe.of(config)
    files, model = _made(recipe, seed, type, flavour, padding_rows, maker, save)
    for name, content in files.items():
        Path(path).with_name(name.replace(_MADE, Path(path).name)).write_bytes(content)
    return copied(model)


@dataclass(frozen=True)
class Recipe:
    """A configuration that is equal to others with the same settings."""

    settings: str
    config: Any = field(compare=False)

    @classmethod
    def of(cls, config: PreTrainedConfig) -> "Recipe":
        return cls(repr((config.__class__, config.to_dict())), config)


def copied(model: Any) -> Any:
    """A model with weights, settings and modules of its own, for a test that changes them.

    It takes a tenth of the time of `copy.deepcopy`, which copies what modules have beside these.
    """
    made: dict[int, Any] = {}

    def own(part: Any) -> Any:
        if id(part) not in made:
            made[id(part)] = module(part) if isinstance(part, nn.Module) else copy.deepcopy(part)
        return made[id(part)]

    def module(part: nn.Module) -> nn.Module:
        twin = object.__new__(type(part))
        for name, value in vars(part).items():
            if name in ("_modules", "_parameters", "_buffers"):
                value = {key: own(each) for key, each in value.items()}
            elif isinstance(value, PreTrainedConfig):
                value = own(value)
            elif isinstance(value, dict | set):
                value = copy.copy(value)
            vars(twin)[name] = value
        return twin

    return own(model)


_MADE = "model.gguf"


# Most tests make a model that another test has made.
@lru_cache(maxsize=512)
def _made(
    recipe: Recipe, seed: int, type: str, flavour: str, padding_rows: int, maker: Any, save: Save
) -> tuple[Mapping[str, bytes], Any]:
    """The files, whose names end with _MADE, and the twin."""
    with tempfile.TemporaryDirectory() as place:
        folder, path = Path(place) / "tiny", Path(place) / "files" / _MADE
        path.parent.mkdir()
        model = write_tiny_folder(
            folder, recipe.config, seed=seed, padding_rows=padding_rows, maker=maker, save=save
        )
        convert(folder, path, type=type, flavour=flavour)
        return {file.name: file.read_bytes() for file in path.parent.iterdir()}, model


def write_tiny_folder(
    folder: Path,
    config: PreTrainedConfig,
    *,
    seed: int = 0,
    padding_rows: int = 0,
    maker: Any = None,
    pad_token_id: int | None = None,
    save: Save = save_pretrained,
) -> Any:
    """The same as a folder that `transformers` saves: weights, settings, tokenizer, template."""
    config = copy.deepcopy(config)
    text = config.get_text_config()
    text.vocab_size = tiny_tokenizer().get_vocab_size() + padding_rows
    text.bos_token_id = text.pad_token_id = tiny_tokenizer().token_to_id(END_OF_TEXT)
    if pad_token_id is not None:
        text.pad_token_id = pad_token_id
    text.eos_token_id = tiny_tokenizer().token_to_id(END)
    model = _random_model(config, seed, maker)
    save(model, folder)
    for name, content in _tokenizer_files().items():
        (folder / name).write_bytes(content)
    (folder / "README.md").write_text("---\nlicense: apache-2.0\n---\n")
    return model


@cache
def _tokenizer_files() -> Mapping[str, bytes]:
    """By name, as `transformers` saves them."""
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=tiny_tokenizer(), bos_token=END_OF_TEXT, eos_token=END
    )
    tokenizer.chat_template = CHAT_TEMPLATE
    with tempfile.TemporaryDirectory() as place:
        tokenizer.save_pretrained(place)
        return {file.name: file.read_bytes() for file in Path(place).iterdir()}


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
    others = tuple(sorted((overrides or {}).items()))
    data, model = _made_llama(Recipe(repr(sizes), sizes), type, others, seed)
    Path(path).write_bytes(data)
    return copied(model)


@lru_cache(maxsize=64)
def _made_llama(
    recipe: Recipe, type: str, overrides: tuple[tuple[str, str], ...], seed: int
) -> tuple[bytes, LlamaForCausalLM]:
    """The content of the file, and the twin."""
    sizes = recipe.config
    with tempfile.TemporaryDirectory() as place:
        plain, path = Path(place) / "plain.gguf", Path(place) / "retyped.gguf"
        model = write_tiny(plain, _llama(sizes), seed=seed, padding_rows=sizes.padding_rows)
        _write_retyped(Reader(plain), path, model, sizes, type, dict(overrides), seed)
        return path.read_bytes(), model


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


def _random_model(config: PreTrainedConfig, seed: int, maker: Any) -> Any:
    """Weights large enough that every part of the computation shows in the logits."""
    makers = (AutoModelForImageTextToText, AutoModelForCausalLM, AutoModel)
    maker = maker or next(auto for auto in makers if config.__class__ in auto._model_mapping)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = maker.from_config(config, attn_implementation="eager").float().eval()
    model.requires_grad_(False)
    generator = torch.Generator().manual_seed(seed)
    stored = model.state_dict()
    buffers = (
        (name, buffer)
        for name, buffer in model.named_buffers()
        if name in stored and buffer.is_floating_point()
    )
    for name, parameter in (*model.named_parameters(), *buffers):
        noise = torch.randn(parameter.shape, generator=generator)
        if parameter.ndim > 1:
            fan_in = prod(parameter.shape[1:]) if parameter.ndim != 3 else max(parameter.shape[1:])
            parameter.copy_(noise * 1.5 * fan_in**-0.5)
        else:
            start = 0.0 if name.endswith("bias") else parameter  # norms around one or nought
            parameter.copy_(noise * 0.3 + start)
    return model


def _llama(sizes: TinyLlama) -> LlamaConfig:
    return LlamaConfig(
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
    )


def _write_retyped(
    source: Reader,
    path: Path | str,
    model: LlamaForCausalLM,
    sizes: TinyLlama,
    type: str,
    overrides: Mapping[str, str],
    seed: int,
) -> None:
    """Write the file with matrices in other types, and without tokens for the padding rows."""
    writer = gguf.GGUFWriter(path, "llama")
    known = tiny_tokenizer().get_vocab_size()
    for name, stored in source.fields.items():
        if name.startswith("GGUF.") or name in ("general.architecture", "general.file_type"):
            continue
        kinds = [*stored.types, None]
        value = stored.contents()
        if name in ("tokenizer.ggml.tokens", "tokenizer.ggml.token_type"):
            value = value[:known]
        writer.add_key_value(name, value, kinds[0], kinds[1])
    parameters, random = _parameters(model), np.random.default_rng(seed)
    for tensor in source.tensors:
        short = tensor.name.removesuffix(".weight").rpartition(".")[2]
        chosen = overrides.get(short, type) if tensor.data.ndim == 2 else "F32"
        read = _write_tensor(writer, tensor.name, tensor.data, chosen, random)
        if tensor.name in parameters:  # rope_freqs is none
            heads = {"attn_q": sizes.heads, "attn_k": sizes.kv_heads}.get(
                tensor.name.split(".")[-2]
            )
            rows = _half_split(read, heads) if heads else read
            parameters[tensor.name].copy_(torch.from_numpy(rows))
    finish(writer)


def _parameters(model: LlamaForCausalLM) -> dict[str, torch.Tensor]:
    """GGUF name -> parameter of the twin."""
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
    writer: gguf.GGUFWriter, name: str, rows: np.ndarray, type: str, random: np.random.Generator
) -> np.ndarray:
    """Write the rows in that type, or random blocks; returns what the file then holds."""
    kind = gguf.GGMLQuantizationType[type]
    stored = (
        gguf.quants.quantize(rows.copy(), kind)
        if type in QUANTIZED
        else _random_blocks(rows.shape, type, random)
    )
    writer.add_tensor(name, stored, raw_dtype=kind)
    return gguf.quants.dequantize(stored, kind).reshape(rows.shape).copy()


def _half_split(rows: np.ndarray, heads: int) -> np.ndarray:
    """Rows of a llama file in the order of transformers, which rotates rows j and j + d/2."""
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
    """Set the scale of each block, and its minimum so that weights are centred."""
    set_scales(data, block_type(type), d, minimum=d * _MIDDLES.get(type, 0.0))
