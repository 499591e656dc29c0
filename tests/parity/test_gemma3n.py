"""Logits of Gemma 3n, the text model, against `transformers`, on tiny random models."""

import json
from pathlib import Path

import pytest
from safetensors.torch import load_file, save_file
from transformers import Gemma3nTextConfig

from model_zoo.convert.convert import convert
from model_zoo.gguf.reader import GGUFFile
from runtime.errors import ModelFileError
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
from tests.tiny_models import tiny_tokenizer, write_tiny, write_tiny_folder

VOCABULARY = tiny_tokenizer().get_vocab_size()
LOCAL, GLOBAL = "sliding_attention", "full_attention"
SIZES = {
    "hidden_size": 64,
    "num_hidden_layers": 4,
    "layer_types": [LOCAL, GLOBAL] * 2,
    "num_kv_shared_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "intermediate_size": 96,
    "max_position_embeddings": 512,
    "sliding_window": 16,
    "hidden_size_per_layer_input": 32,
    "vocab_size_per_layer_input": VOCABULARY,
    "laurel_rank": 16,
    "activation_sparsity_pattern": [0.8, 0.0, 0.6, 0.0],
}
# Bases that turn more within a short prompt than the usual ones.
TURNS = {
    GLOBAL: {"rope_type": "default", "rope_theta": 500.0},
    LOCAL: {"rope_type": "default", "rope_theta": 100.0},
}
STRETCHED = TURNS | {GLOBAL: {"rope_type": "linear", "rope_theta": 500.0, "factor": 4.0}}


def config(**changes) -> Gemma3nTextConfig:
    return Gemma3nTextConfig(**(SIZES | {"rope_parameters": TURNS} | changes))


CONFIGS = {
    "plain": config(),
    "nothing_shared": config(num_kv_shared_layers=0),
    "another_stream": config(altup_active_idx=2, altup_num_inputs=3),
    "usual_bases": config(rope_parameters=None),
    "nothing_sparse": config(activation_sparsity_pattern=[0.0] * 4),
    "window_of_one": config(sliding_window=1),
    "unscaled_correction": config(altup_correct_scale=False),
    "stretched": config(rope_parameters=STRETCHED),
    "gates_of_several_widths": config(intermediate_size=[96, 64, 32, 128]),
}
LARGE = config(
    hidden_size=256,
    head_dim=64,
    intermediate_size=256,
    hidden_size_per_layer_input=256,
    laurel_rank=256,
)


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
    pair = Pair(load_decoder(path), twin, VOCABULARY)
    tokens = random_tokens(PROMPT, seed=20)
    logits = PagedDecoder(pair.decoder).feed({0: tokens})
    return pair.worst(logits, pair.expected(tokens)) <= TOLERANCE


def changed(path: Path, tensors=None, **keys) -> Path:
    """A copy with other tensors and keys: `__` for a dot, without the architecture."""
    named = {f"gemma3n.{name.replace('__', '.')}": value for name, value in keys.items()}
    named["general.architecture"] = "gemma3n"
    return rewrite(path, path.with_name("changed.gguf"), keys=named, tensors=tensors)


def test_files_of_ollamas_flavour_agree_with_what_they_leave_out(tmp_path) -> None:
    path = tmp_path / "tiny.gguf"
    twin = write_tiny(path, config(), flavour="ollama")
    assert agrees(path, twin)
    left_out = "final_logit_softcapping", "attention__key_length", "attention__value_length"
    assert agrees(changed(path, **dict.fromkeys(left_out)), twin)


def test_another_cap_of_logits_agrees(tmp_path) -> None:
    path = tmp_path / "tiny.gguf"
    twin = write_tiny(path, config(final_logit_softcapping=3.0))
    assert agrees(path, twin)
    twin.config.final_logit_softcapping = 1e6  # as good as none
    assert agrees(changed(path, final_logit_softcapping=0.0), twin)


def test_tokens_beyond_the_table_of_layer_inputs_have_its_first_row(tmp_path) -> None:
    path, rows = tmp_path / "tiny.gguf", 100
    twin = write_tiny(path, config())
    table = matrices(path)["per_layer_token_embd.weight"]
    twin.model.config.vocab_size_per_layer_input = rows
    assert agrees(changed(path, {"per_layer_token_embd.weight": table[:rows].copy()}), twin)


def test_the_converter_makes_the_table_as_long_as_the_vocabulary(tmp_path) -> None:
    path = tmp_path / "tiny.gguf"
    write_tiny(path, config(), padding_rows=5)
    table = matrices(path)["per_layer_token_embd.weight"]
    assert len(table) == VOCABULARY + 5
    assert (table[VOCABULARY:] == table[0]).all()


def test_a_stream_that_is_not_there_is_refused(tmp_path) -> None:
    path = tmp_path / "tiny.gguf"
    write_tiny(path, config())
    with pytest.raises(ModelFileError, match="active_idx` is 4; there are 4 streams"):
        load_decoder(changed(path, altup__active_idx=4))


def test_as_many_sparsities_as_layers_are_needed(tmp_path) -> None:
    path = tmp_path / "tiny.gguf"
    write_tiny(path, config())
    with pytest.raises(ModelFileError, match="sparsity_scale` has 3 entries for 4 layers"):
        load_decoder(changed(path, activation_sparsity_scale=[0.5, 0.0, 0.0]))


def test_a_published_checkpoints_spellings_and_unused_tensors_convert(tmp_path) -> None:
    folder, path = tmp_path / "folder", tmp_path / "tiny.gguf"
    twin = write_tiny_folder(folder, config())
    settings = json.loads((folder / "config.json").read_text())
    del settings["rope_parameters"]
    settings |= {"rope_theta": 500.0, "rope_local_base_freq": 100.0, "rope_scaling": None}
    settings = {
        "architectures": ["Gemma3nForConditionalGeneration"],
        "text_config": settings,
    }
    (folder / "config.json").write_text(json.dumps(settings))
    stored = load_file(folder / "model.safetensors")
    parts = {name.replace("model.", "model.language_model."): stored[name] for name in stored}
    unused = parts["model.language_model.layers.0.self_attn.k_proj.weight"].clone()
    parts["model.language_model.layers.2.self_attn.k_proj.weight"] = unused
    parts["model.embed_vision.embedding.weight"] = unused.clone()
    save_file(parts, folder / "model.safetensors")
    convert(folder, path, type="f32")
    assert "blk.2.attn_k.weight" in GGUFFile.open(path).tensors  # llama.cpp wants it
    assert agrees(path, twin)
