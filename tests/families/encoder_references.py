"""Encoders that `transformers` lacks: files with random weights, and what they compute.

The references are written by the description of the models, in torch, and as different from the
layers of `model_zoo` as plain torch is. Files are as llama.cpp's converter writes them.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from tests.gguf_files import finish
from tests.tiny_models import tiny_tokenizer

HIDDEN, HEADS, INNER, LAYERS, EXPERTS, USED = 64, 4, 96, 3, 4, 2
EPS, BASE = 1e-5, 500.0
Tensors = Mapping[str, Tensor]


@dataclass(frozen=True)
class Encoder:
    """`shapes`: of the file's tensors. `states(tensors, tokens)` -> [tokens, hidden]."""

    architecture: str
    keys: Mapping[str, Any]
    shapes: Mapping[str, tuple[int, ...]]
    states: Any

    def write(self, path: Path, seed: int = 0) -> Tensors:
        """Random weights, large enough that every part of the computation shows."""
        generator = torch.Generator().manual_seed(seed)
        tensors = {}
        for name, shape in self.shapes.items():
            noise = torch.randn(shape, generator=generator)
            if len(shape) > 1:
                tensors[name] = noise * 1.5 * shape[-1] ** -0.5
            else:
                tensors[name] = noise * 0.3 + (0.0 if name.endswith("bias") else 1.0)
        write_file(path, self.architecture, self.keys, tensors)
        return tensors


def write_file(path: Path, architecture: str, keys: Mapping[str, Any], tensors: Tensors) -> None:
    writer = gguf.GGUFWriter(path, architecture)
    writer.add_block_count(LAYERS)
    writer.add_context_length(128)
    writer.add_embedding_length(HIDDEN)
    writer.add_feed_forward_length(INNER)
    writer.add_head_count(HEADS)
    writer.add_layer_norm_eps(EPS)
    writer.add_causal_attention(False)
    writer.add_pooling_type(gguf.PoolingType.MEAN)
    texts = sorted(tiny_tokenizer().get_vocab(), key=tiny_tokenizer().get_vocab().__getitem__)
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("qwen2")
    writer.add_token_list(texts)
    writer.add_token_types([gguf.TokenType.NORMAL] * len(texts))
    writer.add_token_merges([f"{texts[0]} {texts[1]}"])
    writer.add_token_type_count(1)
    for name, value in keys.items():
        add = writer.add_float32 if isinstance(value, float) else writer.add_uint32
        add(f"{architecture}.{name}", value)
    for name, tensor in tensors.items():
        writer.add_tensor(name, np.ascontiguousarray(tensor.numpy()))
    finish(writer)


def in_layers(shapes: Mapping[str, tuple[int, ...]], layers: range = range(LAYERS)) -> Any:
    return {f"blk.{n}.{name}": shape for n in layers for name, shape in shapes.items()}


def biased(shapes: Mapping[str, tuple[int, ...]]) -> Mapping[str, tuple[int, ...]]:
    """Matrices by name, with biases."""
    return {f"{name}.weight": shape for name, shape in shapes.items()} | {
        f"{name}.bias": shape[:1] for name, shape in shapes.items()
    }


def norm(tensors: Tensors, name: str, x: Tensor) -> Tensor:
    return F.layer_norm(x, x.shape[-1:], tensors[f"{name}.weight"], tensors[f"{name}.bias"], EPS)


def linear(tensors: Tensors, name: str, x: Tensor) -> Tensor:
    return F.linear(x, tensors[f"{name}.weight"], tensors.get(f"{name}.bias"))


def embedded(tensors: Tensors, tokens: list[int]) -> Tensor:
    x = tensors["token_embd.weight"][tokens] + tensors["token_types.weight"][0]
    return norm(tensors, "token_embd_norm", x)


def rms_norm(tensors: Tensors, name: str, x: Tensor) -> Tensor:
    return F.rms_norm(x, x.shape[-1:], tensors[f"{name}.weight"], EPS)


def rotated(x: Tensor) -> Tensor:
    """x [tokens, heads, dim]."""
    half = x.shape[-1] // 2
    angles = torch.arange(len(x))[:, None] / BASE ** (torch.arange(half) / half)
    turn = torch.polar(torch.ones_like(angles), angles)[:, None]
    turned = torch.complex(x[..., :half], x[..., half:]) * turn
    return torch.cat([turned.real, turned.imag], dim=-1)


def attended(queries: Tensor, keys: Tensor, values: Tensor, bias: Tensor | float = 0.0) -> Tensor:
    """Each [tokens, heads, dim]; bias [heads, tokens, tokens] of scores."""
    scores = torch.einsum("ihd,jhd->hij", queries, keys) / math.sqrt(queries.shape[-1]) + bias
    return torch.einsum("hij,jhd->ihd", scores.softmax(-1), values).flatten(1)


def nomic_moe(tensors: Tensors, tokens: list[int]) -> Tensor:
    """nomic-embed-text-v2-moe, without the bias of the experts' sum."""
    x = embedded(tensors, tokens)
    for n in range(LAYERS):
        qkv = linear(tensors, f"blk.{n}.attn_qkv", x).unflatten(1, (3, HEADS, -1)).unbind(1)
        mixed = attended(rotated(qkv[0]), rotated(qkv[1]), qkv[2])
        x = norm(
            tensors, f"blk.{n}.attn_output_norm", x + linear(tensors, f"blk.{n}.attn_output", mixed)
        )
        if n % 2 == 1:
            added = nomic_experts(tensors, f"blk.{n}", x)
        else:
            added = linear(
                tensors, f"blk.{n}.ffn_down", F.gelu(linear(tensors, f"blk.{n}.ffn_up", x))
            )
        x = norm(tensors, f"blk.{n}.layer_output_norm", x + added)
    return x


def nomic_experts(tensors: Tensors, layer: str, x: Tensor) -> Tensor:
    """Probabilities over all experts are the weights of the most likely ones."""
    shares = linear(tensors, f"{layer}.ffn_gate_inp", x).softmax(-1)
    chosen = shares.topk(USED, dim=-1).indices
    shares = shares * F.one_hot(chosen, EXPERTS).sum(1)
    ups = torch.einsum("td,eid->tei", x, tensors[f"{layer}.ffn_up_exps.weight"])
    downs = torch.einsum("tei,edi->ted", F.gelu(ups), tensors[f"{layer}.ffn_down_exps.weight"])
    return torch.einsum("te,ted->td", shares, downs)


def jina_v2(tensors: Tensors, tokens: list[int]) -> Tensor:
    """Jina Embeddings v2; the model for code has norms of queries and keys, a second norm after
    attention, and the rows of ups before those of gates; others have feed-forwards as BERT. With
    four heads, the slopes are a quarter, a sixteenth, 1 / 64 and 1 / 256."""

    def heads(layer: str, part: str, x: Tensor) -> Tensor:
        rows = linear(tensors, f"{layer}.attn_{part}", x)
        if f"{layer}.attn_{part}_norm.weight" in tensors:
            rows = norm(tensors, f"{layer}.attn_{part}_norm", rows)
        return rows.unflatten(1, (HEADS, -1))

    x, places = embedded(tensors, tokens), torch.arange(len(tokens))
    slopes = torch.tensor([1 / 4, 1 / 16, 1 / 64, 1 / 256])
    bias = -slopes[:, None, None] * (places[:, None] - places).abs()
    for layer in (f"blk.{n}" for n in range(LAYERS)):
        mixed = attended(*(heads(layer, part, x) for part in "qkv"), bias)
        y = norm(
            tensors, f"{layer}.attn_output_norm", x + linear(tensors, f"{layer}.attn_output", mixed)
        )
        if f"{layer}.attn_norm_2.weight" in tensors:
            y = norm(tensors, f"{layer}.attn_norm_2", x + y)
        rows = linear(tensors, f"{layer}.ffn_up", y)
        if f"{layer}.ffn_up.bias" in tensors:
            inner = F.gelu(rows)
        elif f"{layer}.ffn_gate.weight" in tensors:
            inner = F.gelu(linear(tensors, f"{layer}.ffn_gate", y)) * rows
        else:
            gate, up = rows.chunk(2, dim=-1)
            if f"{layer}.attn_q_norm.weight" in tensors:
                gate, up = up, gate
            inner = F.gelu(gate) * up
        added = linear(tensors, f"{layer}.ffn_down", inner)
        x = norm(tensors, f"{layer}.layer_output_norm", y + added)
    return x


def llama_embed(tensors: Tensors, tokens: list[int]) -> Tensor:
    """Nemotron's bidirectional Llama; neighbouring rows of queries and keys are rotated."""

    def heads(layer: str, part: str, x: Tensor) -> Tensor:
        rows = linear(tensors, f"{layer}.attn_{part}", x).unflatten(1, (HEADS, -1))
        if part == "v":
            return rows
        return rotated(torch.cat([rows[..., ::2], rows[..., 1::2]], dim=-1))

    x = tensors["token_embd.weight"][tokens]
    for layer in (f"blk.{n}" for n in range(LAYERS)):
        y = rms_norm(tensors, f"{layer}.attn_norm", x)
        mixed = attended(*(heads(layer, part, y) for part in "qkv"))
        x = x + linear(tensors, f"{layer}.attn_output", mixed)
        y = rms_norm(tensors, f"{layer}.ffn_norm", x)
        y = F.silu(linear(tensors, f"{layer}.ffn_gate", y)) * linear(tensors, f"{layer}.ffn_up", y)
        x = x + linear(tensors, f"{layer}.ffn_down", y)
    return rms_norm(tensors, "output_norm", x)


ROWS = tiny_tokenizer().get_vocab_size()
EMBEDDING = {
    "token_embd.weight": (ROWS, HIDDEN),
    "token_types.weight": (1, HIDDEN),
    "token_embd_norm.weight": (HIDDEN,),
    "token_embd_norm.bias": (HIDDEN,),
}
NORMS = biased({"attn_output_norm": (HIDDEN,), "layer_output_norm": (HIDDEN,)})
DENSE = biased({"ffn_up": (INNER, HIDDEN), "ffn_down": (HIDDEN, INNER)})
FUSED = biased({"attn_qkv": (3 * HIDDEN, HIDDEN), "attn_output": (HIDDEN, HIDDEN)})
JINA_V2 = {
    **EMBEDDING,
    **in_layers(
        biased({f"attn_{part}": (HIDDEN, HIDDEN) for part in ("q", "k", "v", "output")})
        | NORMS
        | biased({"ffn_down": (HIDDEN, INNER)})
    ),
}
JINA_V2_CODE = JINA_V2 | in_layers(
    biased({f"attn_{part}": (HIDDEN,) for part in ("q_norm", "k_norm", "norm_2")})
)
UPS_FIRST = "jina-bert-v2 for code"
REFERENCES = {
    "jina-bert-v2": Encoder(
        "jina-bert-v2",
        {},
        JINA_V2 | in_layers({"ffn_up.weight": (2 * INNER, HIDDEN)}),
        jina_v2,
    ),
    UPS_FIRST: Encoder(
        "jina-bert-v2",
        {},
        JINA_V2_CODE | in_layers({"ffn_up.weight": (2 * INNER, HIDDEN)}),
        jina_v2,
    ),
    "jina-bert-v2 for code, with gates apart": Encoder(
        "jina-bert-v2",
        {},
        JINA_V2_CODE
        | in_layers({"ffn_up.weight": (INNER, HIDDEN), "ffn_gate.weight": (INNER, HIDDEN)}),
        jina_v2,
    ),
    "jina-bert-v2 without gates": Encoder(
        "jina-bert-v2",
        {},
        JINA_V2 | in_layers(biased({"ffn_up": (INNER, HIDDEN)})),
        jina_v2,
    ),
    "llama-embed": Encoder(
        "llama-embed",
        {"rope.freq_base": BASE, "attention.layer_norm_rms_epsilon": EPS},
        {
            "token_embd.weight": (ROWS, HIDDEN),
            "output_norm.weight": (HIDDEN,),
            **in_layers(
                {f"attn_{part}.weight": (HIDDEN, HIDDEN) for part in ("q", "k", "v", "output")}
                | {f"ffn_{part}.weight": (INNER, HIDDEN) for part in ("gate", "up")}
                | {"ffn_down.weight": (HIDDEN, INNER)}
                | {f"{part}_norm.weight": (HIDDEN,) for part in ("attn", "ffn")}
            ),
        },
        llama_embed,
    ),
    "nomic-bert-moe": Encoder(
        "nomic-bert-moe",
        {
            "rope.freq_base": BASE,
            "moe_every_n_layers": 2,
            "expert_count": EXPERTS,
            "expert_used_count": USED,
        },
        {
            **EMBEDDING,
            **in_layers({**FUSED, **NORMS}),
            **in_layers(DENSE, range(0, LAYERS, 2)),
            **in_layers(
                {
                    "ffn_gate_inp.weight": (EXPERTS, HIDDEN),
                    "ffn_up_exps.weight": (EXPERTS, INNER, HIDDEN),
                    "ffn_down_exps.weight": (EXPERTS, HIDDEN, INNER),
                },
                range(1, LAYERS, 2),
            ),
        },
        nomic_moe,
    ),
}
