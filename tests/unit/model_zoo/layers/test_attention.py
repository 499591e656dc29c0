"""The attention layer's options, against attention written out in float64."""

import math
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor
from transformers.models.bloom.modeling_bloom import build_alibi_tensor
from transformers.models.mpt.modeling_mpt import build_mpt_alibi_tensor

from model_zoo.gguf.metadata import Metadata
from model_zoo.gguf.reader import GGUFFile
from model_zoo.gguf.scope import TensorScope
from model_zoo.layers.attention import AttentionOptions, SelfAttention, alibi_slopes, read_sinks
from model_zoo.layers.norm import RMSNorm
from model_zoo.layers.rope import Pairs, Rotary
from model_zoo.layers.rope_scaling import plain_frequencies
from model_zoo.layers.step import Step
from model_zoo.layers.temperature import Temperature
from model_zoo.layers.text_sizes import TextSizes
from runtime.errors import ModelFileError
from runtime.kv.cache_kinds import Full
from runtime.kv.cache_layout import LayerCache
from runtime.worker.model import AttentionPlan, Batch, LayerPages, RowSpan
from tests.gguf_files import write_tensors

TOKENS, HIDDEN, HEADS, KV_HEADS, DIM = 20, 32, 4, 2, 8
EPS = 1e-6
CACHE = LayerCache(Full(), KV_HEADS, DIM, DIM)
SIZES = TextSizes(
    Metadata({"general.architecture": "llama"}, path=Path("tiny.gguf")),
    layers=1,
    hidden=HIDDEN,
    context_length=TOKENS,
    eps=EPS,
    heads=(HEADS,),
    kv_heads=(KV_HEADS,),
    key_dim=DIM,
    value_dim=DIM,
    known_tokens=None,
)
RANDOM = np.random.default_rng(0)
MATRICES = {
    "attn_q": RANDOM.standard_normal((HEADS * DIM, HIDDEN)),
    "attn_k": RANDOM.standard_normal((KV_HEADS * DIM, HIDDEN)),
    "attn_v": RANDOM.standard_normal((KV_HEADS * DIM, HIDDEN)),
    "attn_output": RANDOM.standard_normal((HIDDEN, HEADS * DIM)),
}
NORM = RMSNorm(torch.from_numpy(RANDOM.standard_normal(DIM)).float(), EPS)
SINKS = RANDOM.standard_normal(HEADS)
X = torch.randn(TOKENS, HIDDEN, generator=torch.Generator().manual_seed(0))
POSITIONS = torch.arange(TOKENS)
ROTARY = Rotary(plain_frequencies(DIM, 100.0), Pairs.NEOX)


@pytest.fixture
def scope(tmp_path):
    """A function from arrays to a scope over their file; names without a dot get the suffix."""

    def make(tensors: dict) -> TensorScope:
        full = {
            name if "." in name or name == "attn_sinks" else f"{name}.weight": array
            for name, array in tensors.items()
        }
        path = write_tensors(tmp_path / "attention.gguf", full)
        return TensorScope(GGUFFile.open(path), device=torch.device("cpu"), dtype=torch.float32)

    return make


def layer(w: TensorScope, **options) -> SelfAttention:
    attention = SelfAttention(w, SIZES, 0, CACHE, AttentionOptions(**{"scale": 0.5} | options))
    w.check()
    return attention


def step(*, rotary: Rotary | None = ROTARY, pages: LayerPages | None = None, rows=None) -> Step:
    """All tokens of one sequence at once, in one page."""
    table = torch.zeros(1, 1, dtype=torch.int32)
    whole = torch.arange(TOKENS, dtype=torch.int32)
    plan = AttentionPlan(
        table, torch.zeros_like(whole), torch.zeros_like(whole), whole + 1, POSITIONS,
        (RowSpan(0, TOKENS, 0, 0),),
    )  # fmt: skip
    batch = Batch(torch.zeros(TOKENS, dtype=torch.int64), POSITIONS, POSITIONS, (plan,))
    rotation = None if rotary is None else rotary(POSITIONS)
    return Step(batch, pages or empty_pages(), plan, rotation, rows)


def empty_pages() -> LayerPages:
    return LayerPages(*(torch.zeros(1, 32, KV_HEADS, DIM) for _ in range(2)), 0)


def heads_of(name: str, matrices: dict = MATRICES) -> Tensor:
    """[tokens, heads, dim] of the projection, float64."""
    return (X.double() @ torch.from_numpy(matrices[name]).T).unflatten(1, (-1, DIM))


def normal(x: Tensor, weight: Tensor | None = NORM.weight) -> Tensor:
    x = x * torch.rsqrt(x.square().mean(-1, keepdim=True) + EPS)
    return x if weight is None else x * weight.double()


def turned(x: Tensor) -> Tensor:
    angles = POSITIONS[:, None].double() * ROTARY.frequencies.double()
    first, second = x.chunk(2, dim=-1)
    cos, sin = angles.cos()[:, None], angles.sin()[:, None]
    return torch.cat([first * cos - second * sin, first * sin + second * cos], dim=-1)


def attended(queries: Tensor, keys: Tensor, values: Tensor, *, sinks=None, cap=None) -> Tensor:
    """[tokens, hidden], after the output projection."""
    keys, values = (part.repeat_interleave(HEADS // KV_HEADS, dim=1) for part in (keys, values))
    scores = torch.einsum("qhd,khd->hqk", queries, keys) * 0.5
    scores = scores if cap is None else cap * torch.tanh(scores / cap)
    scores = scores.masked_fill(torch.ones(TOKENS, TOKENS).triu(1).bool(), -torch.inf)
    extra = torch.full((HEADS, TOKENS, 1), -torch.inf, dtype=torch.float64)
    if sinks is not None:
        extra = torch.from_numpy(sinks)[:, None, None].expand(HEADS, TOKENS, 1)
    weights = torch.cat([scores, extra], dim=-1).softmax(-1)[..., :-1]
    mixed = torch.einsum("hqk,khd->qhd", weights, values).flatten(1)
    return mixed @ torch.from_numpy(MATRICES["attn_output"]).T


def near(got: Tensor, expected: Tensor) -> None:
    torch.testing.assert_close(got, expected.float(), rtol=1e-4, atol=1e-3)


QUERIES, KEYS, VALUES = (heads_of(name) for name in ("attn_q", "attn_k", "attn_v"))


def test_without_a_rotary_embedding_nothing_is_rotated(scope) -> None:
    attention = layer(scope(MATRICES))
    near(attention(X, step(rotary=None)), attended(QUERIES, KEYS, VALUES))
    near(attention(X, step()), attended(turned(QUERIES), turned(KEYS), VALUES))


def test_norms_are_applied_before_or_after_rotation(scope) -> None:
    before = layer(scope(MATRICES), q_norm=NORM, k_norm=NORM)
    near(before(X, step()), attended(turned(normal(QUERIES)), turned(normal(KEYS)), VALUES))
    after = layer(scope(MATRICES), rotated_q_norm=NORM, rotated_k_norm=RMSNorm(None, EPS))
    expected = attended(normal(turned(QUERIES)), normal(turned(KEYS), None), VALUES)
    near(after(X, step()), expected)


def test_values_may_have_a_norm(scope) -> None:
    attention = layer(scope(MATRICES), v_norm=RMSNorm(None, EPS))
    near(attention(X, step()), attended(turned(QUERIES), turned(KEYS), normal(VALUES, None)))


def test_caps_and_sinks_reach_the_kernel(scope) -> None:
    for name in ("attn_sinks", "attn_sinks.weight"):
        w = scope(MATRICES | {name: SINKS})
        attention = layer(w, softcap=1.5, sinks=read_sinks(w, HEADS))
        expected = attended(turned(QUERIES), turned(KEYS), VALUES, sinks=SINKS, cap=1.5)
        near(attention(X, step()), expected)


def test_queries_are_scaled_by_the_temperature_of_their_position(scope) -> None:
    attention = layer(scope(MATRICES), temperature=Temperature(0.3, 4, offset=1))
    factors = [1 + 0.3 * math.log(1 + (position + 1) // 4) for position in range(TOKENS)]
    grown = turned(QUERIES) * torch.tensor(factors, dtype=torch.float64)[:, None, None]
    near(attention(X, step()), attended(grown, turned(KEYS), VALUES))


def test_only_selected_rows_are_returned_but_all_are_stored(scope) -> None:
    attention, pages = layer(scope(MATRICES)), empty_pages()
    got = attention(X, step(pages=pages, rows=torch.tensor([7, 2])))
    near(got, attended(turned(QUERIES), turned(KEYS), VALUES)[[7, 2]])
    near(pages.keys[0, :TOKENS], turned(KEYS))
    near(pages.values[0, :TOKENS], VALUES)


def test_a_layer_that_stores_nothing_reads_what_another_has_stored(scope) -> None:
    pages = empty_pages()
    layer(scope(MATRICES))(X, step(pages=pages))
    own = {name: MATRICES[name] for name in ("attn_q", "attn_output")}
    before = pages.keys.clone()
    got = layer(scope(own), stores=False)(X, step(pages=pages))
    near(got, attended(turned(QUERIES), turned(KEYS), VALUES))
    assert torch.equal(pages.keys, before)


def test_keys_before_norm_and_rotation_replace_missing_values(scope) -> None:
    without = {name: matrix for name, matrix in MATRICES.items() if name != "attn_v"}
    attention = layer(scope(without), keys_as_values=True, k_norm=NORM, v_norm=RMSNorm(None, EPS))
    expected = attended(turned(QUERIES), turned(normal(KEYS)), normal(KEYS, None))
    near(attention(X, step()), expected)
    whole = layer(scope(MATRICES), keys_as_values=True)
    near(whole(X, step()), attended(turned(QUERIES), turned(KEYS), VALUES))
    with pytest.raises(ModelFileError, match=r"attn_v\.weight"):
        layer(scope(without))


def test_fused_tensors_and_biases_of_the_file_are_used(scope) -> None:
    biases = {f"{name}.bias": RANDOM.standard_normal(len(MATRICES[name])) for name in MATRICES}
    apart = layer(scope(MATRICES | biases))(X, step())
    joined = ("attn_q", "attn_k", "attn_v")
    whole = {
        "attn_qkv": np.concatenate([MATRICES[name] for name in joined]),
        "attn_qkv.bias": np.concatenate([biases[f"{name}.bias"] for name in joined]),
        "attn_out": MATRICES["attn_output"],
        "attn_out.bias": biases["attn_output.bias"],
    }
    near(layer(scope(whole), output="attn_out")(X, step()), apart.double())
    assert not torch.allclose(apart, layer(scope(MATRICES))(X, step()))


@pytest.mark.parametrize("heads", [1, 4, 6, 8, 12, 13, 20])
def test_slopes_are_those_of_bloom(heads: int) -> None:
    biases = build_alibi_tensor(torch.ones(1, 2, dtype=torch.int64), heads, torch.float32)
    torch.testing.assert_close(alibi_slopes(heads), biases[:, 0, 1])


@pytest.mark.parametrize("heads", [4, 6])
@pytest.mark.parametrize("most", [8, 16])
def test_slopes_are_those_of_mpt(heads: int, most: int) -> None:
    biases = build_mpt_alibi_tensor(heads, 2, most)  # of the last row and the one before
    torch.testing.assert_close(alibi_slopes(heads, most), -biases[:, 0, 0])
