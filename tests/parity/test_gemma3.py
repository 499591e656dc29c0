"""Logits of Gemma 3, the text model, against `transformers`, on tiny random models."""

from pathlib import Path

import pytest
import torch
from transformers import Gemma3TextConfig

from tests.gguf_files import matrices, rewrite
from tests.parity.agreement import (
    CHECKS,
    PROMPT,
    QUANTIZED_TYPES,
    TOLERANCE,
    Pair,
    check_quantized,
    load_decoder,
    make_pair,
    random_tokens,
)
from tests.parity.paged_decoder import PagedDecoder
from tests.tiny_models import tiny_tokenizer, write_tiny

SIZES = {
    "hidden_size": 64,
    "num_hidden_layers": 7,  # the sixth is full
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "query_pre_attn_scalar": 32,
    "intermediate_size": 96,
    "max_position_embeddings": 512,
    "sliding_window": 16,
}
# Bases that turn more within a short prompt than the usual ones.
TURNS = {
    "full_attention": {"rope_type": "default", "rope_theta": 5000.0},
    "sliding_attention": {"rope_type": "default", "rope_theta": 100.0},
}
STRETCHED = TURNS | {"full_attention": {**TURNS["full_attention"], "rope_type": "linear"}}
STRETCHED["full_attention"]["factor"] = 8.0


def config(**changes) -> Gemma3TextConfig:
    return Gemma3TextConfig(**(SIZES | {"rope_parameters": TURNS} | changes))


CONFIGS = {
    "plain": config(),
    "stretched": config(rope_parameters=STRETCHED),
    "usual_bases": config(rope_parameters=None),
    "every_other_layer_full": config(num_hidden_layers=4, sliding_window_pattern=2),
    "window_of_one": config(sliding_window=1),
    "capped_logits": config(final_logit_softcapping=3.0),
    "as_many_layers_as_27b": config(
        num_hidden_layers=62, query_pre_attn_scalar=16, rope_parameters=STRETCHED
    ),
}
LARGE = config(hidden_size=256, head_dim=64, query_pre_attn_scalar=64, intermediate_size=256)


@pytest.fixture(scope="module", params=CONFIGS)
def pair(request, tmp_path_factory) -> Pair:
    return make_pair(CONFIGS[request.param], tmp_path_factory.mktemp("models") / "tiny.gguf")


@pytest.mark.parametrize("check", CHECKS)
def test_logits_agree(pair, check) -> None:
    CHECKS[check](pair)


@pytest.mark.parametrize("type", QUANTIZED_TYPES)
def test_quantized_copies_agree(tmp_path, type) -> None:
    check_quantized(LARGE, tmp_path, type)


def agrees(path: Path, twin) -> bool:
    pair = Pair(load_decoder(path), twin, tiny_tokenizer().get_vocab_size())
    tokens = random_tokens(PROMPT, seed=20)
    logits = PagedDecoder(pair.decoder).feed({0: tokens})
    return pair.worst(logits, pair.expected(tokens)) <= TOLERANCE


def changed(path: Path, **keys) -> Path:
    """A copy with other keys, `__` for a dot and without the architecture."""
    named = {f"gemma3.{name.replace('__', '.')}": value for name, value in keys.items()}
    named["general.architecture"] = "gemma3"
    return rewrite(path, path.with_name("changed.gguf"), keys=named)


def test_ollamas_spellings_of_the_bases_agree(tmp_path) -> None:
    path = tmp_path / "tiny.gguf"
    twin = write_tiny(path, config(), flavour="ollama")
    assert agrees(path, twin)


@pytest.mark.parametrize("layers", [34, 48, 62])
def test_global_positions_of_the_larger_models_are_stretched_where_a_file_is_silent(
    tmp_path, layers
) -> None:
    path = tmp_path / "tiny.gguf"
    scalar = 16 if layers == 62 else 32
    stretched = config(
        num_hidden_layers=layers, query_pre_attn_scalar=scalar, rope_parameters=STRETCHED
    )
    twin = write_tiny(path, stretched, flavour="ollama")
    silent = changed(path, rope__scaling__type=None, rope__scaling__factor=None)
    assert agrees(silent, twin)
    outspoken = changed(path, rope__scaling__type="none", rope__scaling__factor=None)
    assert not agrees(outspoken, twin)


def test_smaller_models_are_not_stretched(tmp_path) -> None:
    path = tmp_path / "tiny.gguf"
    twin = write_tiny(path, config(num_hidden_layers=26), flavour="ollama")
    assert agrees(path, twin)


def test_the_cap_of_logits_that_ollamas_files_state_is_not_meant(tmp_path) -> None:
    path = tmp_path / "tiny.gguf"
    twin = write_tiny(path, config(), flavour="ollama")
    assert agrees(changed(path, final_logit_softcapping=3.0), twin)


def test_what_a_file_leaves_out_is_as_published(tmp_path) -> None:
    path = tmp_path / "tiny.gguf"
    twin = write_tiny(path, config(rope_parameters=None, head_dim=256, query_pre_attn_scalar=256))
    silent = changed(
        path,
        attention__layer_norm_rms_epsilon=None,
        attention__key_length=None,
        attention__value_length=None,
        rope__freq_base=None,
        rope__freq_base_swa=None,
    )
    assert agrees(silent, twin)


def test_a_pattern_may_be_a_number_or_a_truth_value_for_each_layer(tmp_path) -> None:
    path = tmp_path / "tiny.gguf"
    twin = write_tiny(path, config(num_hidden_layers=4, sliding_window_pattern=2))
    assert agrees(path, twin)
    assert agrees(changed(path, attention__sliding_window_pattern=2), twin)
    pattern = [True, False, True, False]
    assert agrees(changed(path, attention__sliding_window_pattern=pattern), twin)


def test_a_head_of_its_own_agrees(tmp_path) -> None:
    path = tmp_path / "tiny.gguf"
    twin = write_tiny(path, config())
    head = matrices(path)["token_embd.weight"][::-1].copy()
    apart = rewrite(
        path,
        tmp_path / "apart.gguf",
        keys={"general.architecture": "gemma3"},
        tensors={"output.weight": head},
    )
    twin.lm_head.weight = torch.nn.Parameter(torch.from_numpy(head), requires_grad=False)
    assert agrees(apart, twin)
