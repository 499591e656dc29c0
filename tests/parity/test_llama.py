"""Logits of the llama family against `transformers`, float32 and eager, on tiny random models."""

from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.profiler import ProfilerActivity, profile
from transformers import LlamaForCausalLM

from model_zoo.architectures.llama import Llama
from model_zoo.gguf.metadata import Metadata
from model_zoo.gguf.reader import GGUFFile
from model_zoo.gguf.scope import TensorScope
from tests.gguf_files import matrices, rewrite
from tests.memory_profile import peak_bytes
from tests.parity.paged_decoder import PagedDecoder
from tests.tiny_models import CONFIGS, write_tiny_llama

TOLERANCE = 1e-4
PROMPT, DECODED = 41, 8
# Configuration, type of the matrices, types that differ from it.
CASES = [
    *((config, "F32", {}) for config in CONFIGS),
    *(("rows_of_256", type, {}) for type in ("F16", "BF16", "Q8_0", "Q4_0", "Q5_K", "Q6_K")),
    ("rows_of_256", "Q4_K", {"attn_v": "Q6_K", "ffn_down": "Q6_K", "token_embd": "Q6_K"}),
    ("tied", "Q8_0", {"attn_k": "F16"}),
    ("gqa", "Q5_0", {"ffn_down": "Q5_1", "attn_v": "Q4_1", "token_embd": "IQ4_NL"}),
    ("rows_of_256", "Q3_K", {"attn_v": "IQ4_XS", "ffn_down": "Q2_K", "token_embd": "Q2_K"}),
    ("rows_of_256", "MXFP4", {"attn_v": "TQ2_0", "ffn_up": "TQ1_0"}),
    ("rows_of_256", "IQ2_XXS", {"attn_v": "IQ1_M", "ffn_down": "IQ3_S", "token_embd": "IQ2_S"}),
]


@dataclass(frozen=True)
class Pair:
    """A loaded decoder and its twin in `transformers`; `known` tokens of the vocabulary exist."""

    decoder: Llama
    twin: LlamaForCausalLM
    known: int

    def expected(self, tokens: list[int]) -> Tensor:
        """Log-probabilities [tokens, known] of the whole sequence at once."""
        with torch.inference_mode():
            logits = self.twin(torch.tensor([tokens])).logits[0]
        return logits[:, : self.known].log_softmax(-1)

    def worst(self, logits: Tensor, expected: Tensor) -> float:
        """The largest difference of log-probabilities."""
        assert logits.dtype == torch.float32 and logits.shape[1] == self.decoder.vocab_size
        assert (logits[:, self.known :] == -torch.inf).all()
        return (logits.log_softmax(-1)[:, : self.known] - expected).abs().max().item()


def load_decoder(path: Path, dtype: torch.dtype = torch.float32) -> Llama:
    file = GGUFFile.open(path)
    scope = TensorScope(file, device=torch.device("cpu"), dtype=dtype)
    decoder = Llama(scope, Metadata(file.metadata, path=path))
    scope.check()
    return decoder


def load_pair(path: Path, twin: LlamaForCausalLM) -> Pair:
    known = len(GGUFFile.open(path).metadata["tokenizer.ggml.tokens"])
    return Pair(load_decoder(path), twin, known)


def name_of(case: tuple[str, str, dict[str, str]]) -> str:
    return "-".join([*case[:2], *case[2]])


@pytest.fixture(scope="module", params=CASES, ids=name_of)
def pair(request, tmp_path_factory) -> Pair:
    config, type, overrides = request.param
    path = tmp_path_factory.mktemp("models") / "tiny.gguf"
    return load_pair(path, write_tiny_llama(path, config=config, type=type, overrides=overrides))


@pytest.fixture(scope="module")
def plain(tmp_path_factory) -> tuple[Path, LlamaForCausalLM]:
    path = tmp_path_factory.mktemp("models") / "plain.gguf"
    return path, write_tiny_llama(path, config="gqa")


def random_tokens(count: int, seed: int) -> list[int]:
    return np.random.default_rng(seed).integers(0, 300, count).tolist()


def test_whole_prompt_agrees(pair: Pair) -> None:
    tokens = random_tokens(PROMPT, seed=1)
    logits = PagedDecoder(pair.decoder).feed({1: tokens})
    assert pair.worst(logits, pair.expected(tokens)) <= TOLERANCE


def test_two_chunks_agree(pair: Pair) -> None:
    tokens, cut = random_tokens(PROMPT, seed=2), 19
    paged = PagedDecoder(pair.decoder)
    first, second = paged.feed({0: tokens[:cut]}), paged.feed({0: tokens[cut:]})
    assert pair.worst(torch.cat([first, second]), pair.expected(tokens)) <= TOLERANCE


def test_prompt_and_decoding_agree(pair: Pair) -> None:
    tokens = random_tokens(PROMPT + DECODED, seed=3)
    paged = PagedDecoder(pair.decoder)
    rows = [paged.feed({0: tokens[:PROMPT]}, outputs=[PROMPT - 1])]
    rows += [paged.feed({0: [token]}) for token in tokens[PROMPT:]]
    assert pair.worst(torch.cat(rows), pair.expected(tokens)[PROMPT - 1 :]) <= TOLERANCE


def test_two_sequences_in_one_batch_agree(pair: Pair) -> None:
    one, two = random_tokens(PROMPT, seed=4), random_tokens(23, seed=5)
    paged = PagedDecoder(pair.decoder)
    paged.feed({1: two[:22]}, outputs=[])
    logits = paged.feed({1: two[22:], 0: one})
    expected = torch.cat([pair.expected(two)[22:], pair.expected(one)])
    assert pair.worst(logits, expected) <= TOLERANCE


def test_output_rows_come_in_the_order_asked_for(plain) -> None:
    pair = load_pair(*plain)
    tokens = random_tokens(PROMPT, seed=6)
    logits = PagedDecoder(pair.decoder).feed({0: tokens}, outputs=[40, 3, 17])
    assert pair.worst(logits, pair.expected(tokens)[[40, 3, 17]]) <= TOLERANCE


def test_a_batch_may_want_no_logits(plain) -> None:
    pair = load_pair(*plain)
    tokens = random_tokens(PROMPT, seed=7)
    paged = PagedDecoder(pair.decoder)
    assert paged.feed({0: tokens[:-1]}, outputs=[]).shape == (0, pair.decoder.vocab_size)
    assert pair.worst(paged.feed({0: tokens[-1:]}), pair.expected(tokens)[-1:]) <= TOLERANCE


def test_one_tensor_with_the_rows_of_q_k_and_v_agrees(plain, tmp_path) -> None:
    path, twin = plain
    changed: dict[str, np.ndarray | None] = {}
    for block in range(2):
        names = [f"blk.{block}.attn_{part}.weight" for part in "qkv"]
        changed[f"blk.{block}.attn_qkv.weight"] = np.concatenate([matrices(path)[n] for n in names])
        changed |= dict.fromkeys(names)
    pair = load_pair(rewrite(path, tmp_path / "fused.gguf", tensors=changed), twin)
    tokens = random_tokens(PROMPT, seed=8)
    assert pair.worst(PagedDecoder(pair.decoder).feed({0: tokens}), pair.expected(tokens)) <= 1e-4


def test_values_narrower_than_keys_agree(plain, tmp_path) -> None:
    """The twin has the missing half of each value head as zeros."""
    path = tmp_path / "tiny.gguf"
    twin = write_tiny_llama(path, config="gqa")
    heads, kv_heads, dim, kept = 4, 2, 16, 8
    changed: dict[str, np.ndarray | None] = {}
    for block, layer in enumerate(twin.model.layers):
        attention, prefix = layer.self_attn, f"blk.{block}.attn"
        values = attention.v_proj.weight.view(kv_heads, dim, -1)
        values[:, kept:] = 0
        changed[f"{prefix}_v.weight"] = values[:, :kept].flatten(0, 1).numpy()
        output = attention.o_proj.weight.view(-1, heads, dim)[:, :, :kept]
        changed[f"{prefix}_output.weight"] = output.flatten(1).numpy()
    keys = {"llama.attention.value_length": kept}
    pair = load_pair(rewrite(path, tmp_path / "narrow.gguf", keys=keys, tensors=changed), twin)
    tokens = random_tokens(PROMPT, seed=9)
    assert pair.decoder.cache_layers[0].value_dim == kept
    assert pair.worst(PagedDecoder(pair.decoder).feed({0: tokens}), pair.expected(tokens)) <= 1e-4


def test_heads_rotated_in_part_agree(tmp_path) -> None:
    """The twin turns the other pairs by an angle of nought."""
    path = tmp_path / "tiny.gguf"
    twin = write_tiny_llama(path, config="gqa")
    rotated, pairs = 8, 8
    frequencies = torch.zeros(pairs)
    frequencies[: rotated // 2] = 10000.0 ** (-torch.arange(0, rotated, 2) / rotated)
    twin.model.rotary_emb.inv_freq = frequencies
    keys = {"llama.rope.dimension_count": rotated}
    pair = load_pair(rewrite(path, tmp_path / "partly.gguf", keys=keys), twin)
    tokens = random_tokens(PROMPT, seed=10)
    assert pair.worst(PagedDecoder(pair.decoder).feed({0: tokens}), pair.expected(tokens)) <= 1e-4


def test_older_spellings_of_keys_agree(tmp_path) -> None:
    """Sizes as arrays, linear scaling under its old key, the head size left to be derived."""
    path = tmp_path / "tiny.gguf"
    twin = write_tiny_llama(path, config="linear_rope")
    keys = {
        "llama.attention.head_count": [4, 4],
        "llama.attention.head_count_kv": [2, 2],
        "llama.feed_forward_length": [96, 96],
        "llama.rope.scaling.type": None,
        "llama.rope.scaling.factor": None,
        "llama.rope.scale_linear": 2.0,
        "llama.rope.freq_base": None,
        "llama.attention.key_length": None,
        "llama.attention.value_length": None,
        "llama.rope.dimension_count": None,
        "llama.vocab_size": None,
    }
    pair = load_pair(rewrite(path, tmp_path / "older.gguf", keys=keys), twin)
    tokens = random_tokens(PROMPT, seed=11)
    assert pair.worst(PagedDecoder(pair.decoder).feed({0: tokens}), pair.expected(tokens)) <= 1e-4


def test_bfloat16_activations_stay_near(plain) -> None:
    path, twin = plain
    pair = Pair(load_decoder(path, torch.bfloat16), twin, load_pair(path, twin).known)
    tokens = random_tokens(PROMPT, seed=12)
    logits = PagedDecoder(pair.decoder, dtype=torch.bfloat16).feed({0: tokens})
    assert TOLERANCE < pair.worst(logits, pair.expected(tokens)) < 0.5
    expected = pair.expected(tokens)
    divergence = (expected.exp() * (expected - logits.log_softmax(-1)[:, : pair.known])).sum(-1)
    assert divergence.max() < 0.01


@pytest.mark.parametrize("type", ["F32", "Q5_K", "IQ2_XS"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("rows, outputs", [(1, 1), (1000, 3), (1000, 1000)])
def test_a_step_allocates_no_more_than_it_declares(tmp_path, type, dtype, rows, outputs) -> None:
    path = tmp_path / "tiny.gguf"
    write_tiny_llama(path, config="rows_of_256", type=type)
    decoder = load_decoder(path, dtype)
    paged = PagedDecoder(decoder, pages_per_sequence=125, dtype=dtype)
    batch = paged.batch({0: random_tokens(rows, seed=13)}, outputs=range(outputs))
    decoder.forward(batch, paged.cache)
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as recorded:
        decoder.forward(batch, paged.cache)
    assert 0 < peak_bytes(recorded) <= decoder.activation_bytes(rows, outputs)
