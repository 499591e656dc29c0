"""Writes a GGUF file of Llama-3.2-1B's shape with random weights, for benchmarks."""

from dataclasses import dataclass
from pathlib import Path

import numpy as np
from gguf import GGMLQuantizationType, GGUFWriter, quants
from numpy.random import Generator

from bench.vocabulary import Vocabulary, write_vocabulary

LABELS = ("Q4_0", "Q4_K", "Q8_0", "F16")
WEIGHT_DEVIATION = 0.02
BLOCK_OF_Q4_K = 256


@dataclass(frozen=True, slots=True)
class Shape:
    """The sizes of a llama model; the defaults are Llama-3.2-1B's."""

    layers: int = 16
    hidden: int = 2048
    feed_forward: int = 8192
    heads: int = 32
    kv_heads: int = 8
    head_dim: int = 64
    context: int = 131072
    rope_base: float = 500000.0

    def matrices(self) -> dict[str, tuple[int, int]]:
        """Name in a block -> (rows out, columns in)."""
        return {
            "attn_q": (self.heads * self.head_dim, self.hidden),
            "attn_k": (self.kv_heads * self.head_dim, self.hidden),
            "attn_v": (self.kv_heads * self.head_dim, self.hidden),
            "attn_output": (self.hidden, self.heads * self.head_dim),
            "ffn_gate": (self.feed_forward, self.hidden),
            "ffn_up": (self.feed_forward, self.hidden),
            "ffn_down": (self.hidden, self.feed_forward),
        }


def ensure_model(folder: Path, label: str, vocabulary: Vocabulary, shape: Shape) -> Path:
    """The path of the model, which is written if it does not exist."""
    path = folder / f"random-1b-{label}-{vocabulary.name}.gguf"
    if not path.exists():
        folder.mkdir(parents=True, exist_ok=True)
        unfinished = path.with_suffix(".part")
        write_model(unfinished, label, vocabulary, shape)
        unfinished.rename(path)
    return path


def write_model(path: Path, label: str, vocabulary: Vocabulary, shape: Shape) -> None:
    """All layers have the same random matrices; the head is tied to the embedding.

    Embeddings of tokens other than plain text are zero, so their logits are 0 and far below the
    best ones: answers are readable and do not end early.
    """
    kind = GGMLQuantizationType[label]
    random = np.random.default_rng(1)
    writer = GGUFWriter(path, "llama")
    _write_sizes(writer, shape, len(vocabulary.tokens))
    write_vocabulary(writer, vocabulary)
    embedding = _random_matrix(random, (len(vocabulary.tokens), shape.hidden), kind)
    embedding[~vocabulary.is_text] = 0
    writer.add_tensor("token_embd.weight", embedding, raw_dtype=kind)
    ones = np.ones(shape.hidden, dtype=np.float32)
    writer.add_tensor("output_norm.weight", ones)
    writer.add_tensor("rope_freqs.weight", llama3_rope_factors(shape))
    matrices = {name: _random_matrix(random, size, kind) for name, size in shape.matrices().items()}
    for layer in range(shape.layers):
        writer.add_tensor(f"blk.{layer}.attn_norm.weight", ones)
        writer.add_tensor(f"blk.{layer}.ffn_norm.weight", ones)
        for name, matrix in matrices.items():
            writer.add_tensor(f"blk.{layer}.{name}.weight", matrix, raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def _write_sizes(writer: GGUFWriter, shape: Shape, vocabulary_size: int) -> None:
    writer.add_name("random-1b")
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
    writer.add_vocab_size(vocabulary_size)


def llama3_rope_factors(shape: Shape) -> np.ndarray:
    """[head_dim / 2] float32: the divisor of each rotary frequency, as in Llama 3.2."""
    factor, low, high, original_context = 32.0, 1.0, 4.0, 8192
    exponents = np.arange(0, shape.head_dim, 2, dtype=np.float64) / shape.head_dim
    turns = original_context / (2 * np.pi * shape.rope_base**exponents)
    smooth = np.clip((turns - low) / (high - low), 0, 1)
    return (1 / ((1 - smooth) / factor + smooth)).astype(np.float32)


def _random_matrix(
    random: Generator, size: tuple[int, int], kind: GGMLQuantizationType
) -> np.ndarray:
    """[rows, row bytes] uint8, or [rows, columns] float16 for F16."""
    if kind is GGMLQuantizationType.Q4_K:
        return _random_q4_k(random, size)
    values = random.standard_normal(size, dtype=np.float32)
    values *= WEIGHT_DEVIATION
    return quants.quantize(values, kind)


def _random_q4_k(random: Generator, size: tuple[int, int]) -> np.ndarray:
    """Valid Q4_K blocks (float16 scale and minimum, 12 bytes of 6-bit scales, 128 of nibbles).

    Value = d * scale * nibble - dmin * minimum, with scale and minimum from 0..63 and nibble from
    0..15; dmin = 7.5 d centres it, and d gives it the standard deviation of the other types.
    """
    rows, columns = size
    blocks = rows * columns // BLOCK_OF_Q4_K
    deviation_at_d_1 = 259.5
    d = WEIGHT_DEVIATION / deviation_at_d_1
    scales = np.array([d, 7.5 * d], dtype=np.float16).view(np.uint8)
    data = np.empty((blocks, 144), dtype=np.uint8)
    data[:, :4] = scales
    data[:, 4:] = np.frombuffer(random.bytes(blocks * 140), dtype=np.uint8).reshape(blocks, 140)
    return data.reshape(rows, -1)
