"""Logits of Llama models with every type of weights, and checks for which one model suffices."""

from pathlib import Path

import pytest
import torch
from transformers import LlamaForCausalLM

from model_zoo.gguf.reader import GGUFFile
from runtime.kv.cache_types import CacheType
from tests.families.agreement import (
    CHECKS,
    PROMPT,
    TOLERANCE,
    Pair,
    check_declared_memory,
    load_decoder,
    random_tokens,
)
from tests.families.paged_decoder import PagedDecoder
from tests.tiny_models import write_tiny_llama

# Configuration, type of the matrices, types that differ from it.
CASES = [
    *((config, "F32", {}) for config in ("padded_vocabulary", "rows_of_256")),
    *(("rows_of_256", type, {}) for type in ("F16", "BF16", "Q8_0", "Q4_0", "Q5_K", "Q6_K")),
    ("rows_of_256", "Q4_K", {"attn_v": "Q6_K", "ffn_down": "Q6_K", "token_embd": "Q6_K"}),
    ("tied", "Q8_0", {"attn_k": "F16"}),
    ("gqa", "Q5_0", {"ffn_down": "Q5_1", "attn_v": "Q4_1", "token_embd": "IQ4_NL"}),
    ("rows_of_256", "Q3_K", {"attn_v": "IQ4_XS", "ffn_down": "Q2_K", "token_embd": "Q2_K"}),
    ("rows_of_256", "MXFP4", {"attn_v": "TQ2_0", "ffn_up": "TQ1_0"}),
    ("rows_of_256", "IQ2_XXS", {"attn_v": "IQ1_M", "ffn_down": "IQ3_S", "token_embd": "IQ2_S"}),
]


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


@pytest.mark.parametrize("check", CHECKS)
def test_logits_agree(pair, check) -> None:
    CHECKS[check](pair)


def test_output_rows_have_the_requested_order(plain) -> None:
    pair = load_pair(*plain)
    tokens = random_tokens(PROMPT, seed=6)
    logits = PagedDecoder(pair.decoder).feed({0: tokens}, outputs=[40, 3, 17])
    assert pair.worst(logits, pair.expected(tokens)[[40, 3, 17]]) <= TOLERANCE


def test_a_batch_may_have_no_output_rows(plain) -> None:
    pair = load_pair(*plain)
    tokens = random_tokens(PROMPT, seed=7)
    paged = PagedDecoder(pair.decoder)
    assert paged.feed({0: tokens[:-1]}, outputs=[]).shape == (0, pair.decoder.vocab_size)
    assert pair.worst(paged.feed({0: tokens[-1:]}), pair.expected(tokens)[-1:]) <= TOLERANCE


def test_bfloat16_activations_stay_near(plain) -> None:
    path, twin = plain
    pair = Pair(load_decoder(path, torch.bfloat16), twin, load_pair(path, twin).known)
    tokens = random_tokens(PROMPT, seed=12)
    logits = PagedDecoder(pair.decoder, type=CacheType.BFLOAT16).feed({0: tokens})
    assert TOLERANCE < pair.worst(logits, pair.expected(tokens)) < 0.5
    expected = pair.expected(tokens)
    divergence = (expected.exp() * (expected - logits.log_softmax(-1)[:, : pair.known])).sum(-1)
    assert divergence.max() < 0.01


@pytest.mark.parametrize("type", ["F32", "Q5_K", "IQ2_XS"])
@pytest.mark.parametrize(
    "dtype, cached",
    [
        (torch.float32, CacheType.FLOAT32),
        (torch.float32, CacheType.Q4_0),
        (torch.bfloat16, CacheType.BFLOAT16),
    ],
)
def test_a_step_allocates_no_more_than_it_declares(tmp_path, type, dtype, cached) -> None:
    path = tmp_path / "tiny.gguf"
    write_tiny_llama(path, config="rows_of_256", type=type)
    decoder = load_decoder(path, dtype)
    for rows, outputs in ((1, 1), (1000, 3), (1000, 1000)):
        check_declared_memory(decoder, rows, outputs, type=cached)
