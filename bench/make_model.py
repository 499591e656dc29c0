"""Writes GGUF files with random weights, for benchmarks: Llama-3.2-1B's shape, and a mixture of
experts of Qwen3-30B-A3B's shape with fewer layers."""

from dataclasses import dataclass
from pathlib import Path

import numpy as np
from gguf import GGML_QUANT_SIZES, GGMLQuantizationType, GGUFWriter, quants
from numpy.random import Generator

from bench.cache import written_once
from bench.vocabulary import Vocabulary, write_vocabulary

# Block types and a mix of them, each of which gives a model of the same shape.
LABELS = ("Q4_0", "Q4_K", "Q4_K_M", "Q5_K", "Q6_K", "Q8_0", "F16", "BF16", "IQ4_XS", "MXFP4")
MOE = "MoE Q4_K"
WEIGHT_DEVIATION = 0.02
# For types whose blocks are random bytes: the offset of each float16 scale in a block, and the
# scale's value relative to the first one. A value other than 1 is a minimum, and centres the
# values.
_SCALES = {
    "Q4_K": {0: 1.0, 2: 7.5},
    "Q5_K": {0: 1.0, 2: 15.5},
    "Q6_K": {208: 1.0},
    "IQ4_XS": {0: 1.0},
}
# MXFP4 has exponents instead; their frequencies give it the standard deviation of the other types.
_EXPONENTS, _SHARES = (119, 120), (0.3, 0.7)
_SAMPLE_BLOCKS = 1024  # the scales are chosen by the standard deviation of this many blocks


@dataclass(frozen=True, slots=True)
class Shape:
    """The sizes of a llama model or, with `experts`, of a qwen3moe model; `feed_forward` is then
    the size of one expert. The defaults are Llama-3.2-1B's. `seed`: of the weights, which do not
    depend on the number of layers. `further`: what the norms of layers from `first` on multiply by,
    so that these layers add little (or nothing) to the answers, and take the same time."""

    name: str = "1b"
    layers: int = 16
    hidden: int = 2048
    feed_forward: int = 8192
    heads: int = 32
    kv_heads: int = 8
    head_dim: int = 64
    context: int = 131072
    rope_base: float = 500000.0
    experts: int = 0
    experts_used: int = 0
    seed: int = 1
    first: int | None = None
    further: float = 0.0

    def matrices(self) -> dict[str, tuple[int, ...]]:
        """Name in a block -> ([experts,] rows out, columns in)."""
        each, name = ((self.experts,), "_exps") if self.experts else ((), "")
        return {
            "attn_q": (self.heads * self.head_dim, self.hidden),
            "attn_k": (self.kv_heads * self.head_dim, self.hidden),
            "attn_v": (self.kv_heads * self.head_dim, self.hidden),
            "attn_output": (self.hidden, self.heads * self.head_dim),
            f"ffn_gate{name}": (*each, self.feed_forward, self.hidden),
            f"ffn_up{name}": (*each, self.feed_forward, self.hidden),
            f"ffn_down{name}": (*each, self.hidden, self.feed_forward),
        }


MOE_SHAPE = Shape(
    name="moe", layers=4, feed_forward=768, kv_heads=4, head_dim=128, context=40960, rope_base=1e6,
    experts=128, experts_used=8,
)  # fmt: skip


def ensure_model(folder: Path, label: str, vocabulary: Vocabulary, shape: Shape) -> Path:
    """The path of the model, which is written if it does not exist."""
    path = folder / f"random-{shape.name}-{label}-{vocabulary.name}.gguf"
    return written_once(path, lambda file: write_model(file, label, vocabulary, shape))


def write_model(path: Path, label: str, vocabulary: Vocabulary, shape: Shape) -> None:
    """All layers have the same random matrices; the head is tied to the embedding.

    Embeddings of tokens other than plain text are zero, so their logits are 0 and far below the
    best ones: answers are readable and do not end early.
    """
    random = np.random.default_rng(shape.seed)
    writer = GGUFWriter(path, "qwen3moe" if shape.experts else "llama")
    write_sizes(writer, shape, len(vocabulary.tokens))
    write_vocabulary(writer, vocabulary)
    kind = kind_of(label, "token_embd", 0, shape.layers)
    embedding = _random_matrix(random, (len(vocabulary.tokens), shape.hidden), kind)
    embedding[~vocabulary.is_text] = 0
    writer.add_tensor("token_embd.weight", embedding, raw_dtype=kind)
    writer.add_tensor("output_norm.weight", np.ones(shape.hidden, dtype=np.float32))
    if not shape.experts:
        writer.add_tensor("rope_freqs.weight", llama3_rope_factors(shape))
    matrices: dict[tuple[str, GGMLQuantizationType], np.ndarray] = {}
    for layer in range(shape.layers):
        for name, values in _vectors(shape, random, layer).items():
            writer.add_tensor(f"blk.{layer}.{name}.weight", values)
        for name, size in shape.matrices().items():
            kind = kind_of(label, name, layer, shape.layers)
            if (name, kind) not in matrices:
                matrices[name, kind] = _random_matrix(random, size, kind)
            writer.add_tensor(f"blk.{layer}.{name}.weight", matrices[name, kind], raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def kind_of(label: str, name: str, layer: int, layers: int) -> GGMLQuantizationType:
    """The type of a tensor. Q4_K_M is llama.cpp's mix: Q6_K for the embedding, which is also the
    output head, and for `attn_v` and `ffn_down` of about half of the layers."""
    if label == MOE:
        return GGMLQuantizationType.Q4_K
    if label != "Q4_K_M":
        return GGMLQuantizationType[label]
    eighth = layers // 8
    more = layer < eighth or layer >= 7 * layers // 8 or (layer - eighth) % 3 == 2
    finer = name == "token_embd" or (more and name in ("attn_v", "ffn_down"))
    return GGMLQuantizationType.Q6_K if finer else GGMLQuantizationType.Q4_K


def _vectors(shape: Shape, random: Generator, layer: int) -> dict[str, np.ndarray]:
    """The float32 tensors of a layer: norms, and the router of experts."""
    scale = 1.0 if shape.first is None or layer < shape.first else shape.further
    norm = np.full(shape.hidden, scale, dtype=np.float32)
    vectors = {"attn_norm": norm, "ffn_norm": norm}
    if shape.experts:
        per_head = np.ones(shape.head_dim, dtype=np.float32)
        router = random.standard_normal((shape.experts, shape.hidden), dtype=np.float32)
        vectors |= {"attn_q_norm": per_head, "attn_k_norm": per_head}
        vectors["ffn_gate_inp"] = router * np.float32(WEIGHT_DEVIATION)
    return vectors


def write_sizes(writer: GGUFWriter, shape: Shape, vocabulary_size: int) -> None:
    writer.add_name(f"random-{shape.name}")
    writer.add_block_count(shape.layers)
    writer.add_context_length(shape.context)
    writer.add_embedding_length(shape.hidden)
    writer.add_feed_forward_length(shape.feed_forward)
    writer.add_head_count(shape.heads)
    writer.add_head_count_kv(shape.kv_heads)
    writer.add_key_length(shape.head_dim)
    writer.add_value_length(shape.head_dim)
    writer.add_rope_dimension_count(shape.head_dim)
    writer.add_rope_freq_base(shape.rope_base)
    writer.add_layer_norm_rms_eps(1e-5)
    if shape.experts:
        writer.add_expert_count(shape.experts)
        writer.add_expert_used_count(shape.experts_used)
        writer.add_expert_feed_forward_length(shape.feed_forward)
    writer.add_vocab_size(vocabulary_size)


def llama3_rope_factors(shape: Shape) -> np.ndarray:
    """[head_dim / 2] float32: the divisor of each rotary frequency, as in Llama 3.2."""
    factor, low, high, original_context = 32.0, 1.0, 4.0, 8192
    exponents = np.arange(0, shape.head_dim, 2, dtype=np.float64) / shape.head_dim
    turns = original_context / (2 * np.pi * shape.rope_base**exponents)
    smooth = np.clip((turns - low) / (high - low), 0, 1)
    return (1 / ((1 - smooth) / factor + smooth)).astype(np.float32)


def _random_matrix(
    random: Generator, size: tuple[int, ...], kind: GGMLQuantizationType
) -> np.ndarray:
    """[..., rows, row bytes] uint8, or [..., rows, columns] float16 for F16."""
    if kind.name in _SCALES or kind is GGMLQuantizationType.MXFP4:
        return _random_blocks(random, size, kind)
    values = random.standard_normal(size, dtype=np.float32)
    values *= WEIGHT_DEVIATION
    return quants.quantize(values, kind)


def _random_blocks(
    random: Generator, size: tuple[int, ...], kind: GGMLQuantizationType
) -> np.ndarray:
    """Valid blocks of random bytes; the values have the same standard deviation for all types."""
    elements, nbytes = GGML_QUANT_SIZES[kind]
    *rows, columns = size
    count = int(np.prod(size)) // elements
    blocks = np.frombuffer(random.bytes(count * nbytes), dtype=np.uint8).reshape(count, nbytes)
    blocks = blocks.copy()
    if kind is GGMLQuantizationType.MXFP4:
        blocks[:, 0] = random.choice(_EXPONENTS, size=count, p=_SHARES)
    else:
        _set_scales(blocks, kind, 1.0)
        sample = quants.dequantize(blocks[:_SAMPLE_BLOCKS], kind)
        _set_scales(blocks, kind, WEIGHT_DEVIATION / sample.std())
    return blocks.reshape(*rows, columns // elements * nbytes)


def _set_scales(blocks: np.ndarray, kind: GGMLQuantizationType, scale: float) -> None:
    for offset, multiple in _SCALES[kind.name].items():
        blocks[:, offset : offset + 2] = np.array([multiple * scale], np.float16).view(np.uint8)
