"""Conversion of embedding models: pooling, and settings that files cannot express."""

import json
from pathlib import Path
from typing import Any

import gguf
import pytest
import torch
from gguf.vocab import SpecialVocab
from transformers import AutoModel, BertConfig, BertTokenizer

from model_zoo.convert.convert_folder import convert
from model_zoo.gguf.reader import GGUFFile
from model_zoo.registry import load
from runtime.errors import ModelFileError, UnsupportedModelError
from tests.dense_modules import write_dense
from tests.families.encoder_configs import ENCODERS
from tests.tiny_models import write_tiny_folder
from tests.unit.model_zoo.convert.checkpoint_changes import SIZES, TINY_LLAMA, copy, settings

FLAGS = ("cls_token", "mean_tokens", "max_tokens", "mean_sqrt_len_tokens", "lasttoken")


@pytest.fixture(scope="module")
def saved(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("saved") / "llama"
    write_tiny_folder(folder, TINY_LLAMA)
    return folder


@pytest.fixture(scope="module")
def encoder(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("saved") / "bert"
    sizes = {key: value for key, value in SIZES.items() if key != "num_key_value_heads"}
    write_tiny_folder(folder, BertConfig(**sizes), maker=AutoModel)
    (folder / "vocab.txt").write_text("[PAD]\n[UNK]\n[CLS]\n[SEP]\n[MASK]\nthe\n")
    BertTokenizer(vocab=str(folder / "vocab.txt")).save_pretrained(folder)
    return folder


def pooled(folder: Path, target: Path, module: dict[str, Any]) -> Path:
    changed = copy(folder, target)
    (changed / "1_Pooling").mkdir()
    (changed / "1_Pooling" / "config.json").write_text(json.dumps(module))
    return changed


@pytest.fixture(scope="module")
def gemma(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("saved") / "gemma"
    write_tiny_folder(folder, ENCODERS["gemma_embedding"], maker=AutoModel)
    return folder


def flags(*modes: str) -> dict[str, Any]:
    stated = {f"pooling_mode_{mode}": mode in modes for mode in FLAGS}
    return {"word_embedding_dimension": 64, "include_prompt": True, **stated}


@pytest.mark.parametrize(
    "module, kind",
    [
        (flags("mean_tokens"), 1),
        (flags("cls_token"), 2),
        (flags("lasttoken"), 3),
        ({"embedding_dimension": 64, "pooling_mode": "mean"}, 1),
        ({"embedding_dimension": 64, "pooling_mode": "lasttoken"}, 3),
    ],
)
def test_the_pooling_of_a_decoder_is_converted(saved, tmp_path, module, kind) -> None:
    convert(pooled(saved, tmp_path / "changed", module), tmp_path / "model.gguf")
    fields = gguf.GGUFReader(tmp_path / "model.gguf").fields
    assert fields["llama.pooling_type"].contents() == kind


@pytest.mark.parametrize("setting", [{"is_causal": False}, {"use_bidirectional_attention": True}])
def test_bidirectional_attention_of_a_decoder_is_converted(saved, tmp_path, setting) -> None:
    changed = copy(saved, tmp_path / "changed")
    settings(changed, **setting)
    convert(changed, tmp_path / "model.gguf")
    fields = gguf.GGUFReader(tmp_path / "model.gguf").fields
    assert fields["llama.attention.causal"].contents() is False
    with pytest.raises(UnsupportedModelError, match=r"llama\.attention\.causal"):
        load(tmp_path / "model.gguf", device=torch.device("cpu"), dtype=torch.float32)


def test_a_model_without_pooling_has_no_pooling_key(saved, tmp_path) -> None:
    convert(saved, tmp_path / "model.gguf")
    assert "llama.pooling_type" not in gguf.GGUFReader(tmp_path / "model.gguf").fields


@pytest.mark.parametrize(
    "module, words",
    [
        (flags("max_tokens"), "pools by pooling_mode_max_tokens;"),
        (flags("cls_token", "mean_tokens"), "pooling_mode_cls_token, pooling_mode_mean_tokens;"),
        (flags(), "pools by nothing;"),
        ({"pooling_mode": "weightedmean"}, "pools by weightedmean;"),
    ],
)
def test_other_pooling_modes_are_refused(saved, tmp_path, module, words) -> None:
    changed = pooled(saved, tmp_path / "changed", module)
    with pytest.raises(UnsupportedModelError, match=words):
        convert(changed, tmp_path / "model.gguf")


def test_further_modules_are_refused(saved, tmp_path) -> None:
    changed = pooled(saved, tmp_path / "changed", flags("mean_tokens"))
    (changed / "2_LayerNorm").mkdir()
    with pytest.raises(UnsupportedModelError, match="2_LayerNorm: is a further module"):
        convert(changed, tmp_path / "model.gguf")


def test_a_matrix_after_pooling_is_refused_if_the_architecture_has_none(saved, tmp_path) -> None:
    changed = pooled(saved, tmp_path / "changed", flags("mean_tokens"))
    write_dense(changed, "2_Dense", torch.eye(64))
    with pytest.raises(ModelFileError, match=r"does not know.*2_Dense\.linear\.weight"):
        convert(changed, tmp_path / "model.gguf")


@pytest.mark.parametrize("activation", ["torch.nn.modules.activation.Tanh", None])
def test_an_activation_after_pooling_is_refused(gemma, tmp_path, activation) -> None:
    changed = pooled(gemma, tmp_path / "changed", flags("mean_tokens"))
    write_dense(changed, "2_Dense", torch.eye(64), activation=activation)
    with pytest.raises(UnsupportedModelError, match=f"2_Dense.* has the activation {activation}"):
        convert(changed, tmp_path / "model.gguf")


def test_matrices_after_pooling_are_converted(gemma, tmp_path) -> None:
    changed = pooled(gemma, tmp_path / "changed", flags("mean_tokens"))
    write_dense(changed, "2_Dense", torch.ones(96, 64))
    write_dense(changed, "3_Dense", torch.ones(64, 96))
    convert(changed, tmp_path / "model.gguf")
    file = GGUFFile.open(tmp_path / "model.gguf")
    sizes = {"dense_2_feat_in": 64, "dense_2_feat_out": 96, "dense_3_feat_in": 96}
    assert {f"gemma-embedding.{name}": size for name, size in sizes.items()}.items() <= (
        file.metadata.items()
    )
    assert [file.tensors[f"dense_{n}.weight"].shape for n in (2, 3)] == [(96, 64), (64, 96)]


def test_gemma_without_attention_in_both_directions_is_refused(gemma, tmp_path) -> None:
    changed = copy(gemma, tmp_path / "changed")
    settings(changed, use_bidirectional_attention=False)
    with pytest.raises(UnsupportedModelError, match="attend to earlier tokens only"):
        convert(changed, tmp_path / "model.gguf")


def test_tokens_that_frame_texts_are_stated_as_by_the_gguf_package(encoder, tmp_path) -> None:
    convert(encoder, tmp_path / "model.gguf")
    fields = gguf.GGUFReader(tmp_path / "model.gguf").fields
    expected = SpecialVocab(encoder, n_vocab=6).add_special_token
    stated = {name: fields[f"tokenizer.ggml.add_{name}_token"].contents() for name in expected}
    assert stated == expected == {"bos": True, "eos": True, "sep": False}


@pytest.mark.parametrize("changes", [{"handle_chinese_chars": False}, {"clean_text": False}])
def test_normalisers_that_files_cannot_express_are_refused(encoder, tmp_path, changes) -> None:
    changed = with_normalizer(encoder, tmp_path / "changed", changes)
    (name,) = changes
    with pytest.raises(UnsupportedModelError, match=f"its normalizer has `{name}` False"):
        convert(changed, tmp_path / "model.gguf")
    convert(encoder, tmp_path / "model.gguf")


@pytest.mark.parametrize("strips", [None, False, True])
def test_whether_accents_are_stripped_is_converted(encoder, tmp_path, strips) -> None:
    changed = with_normalizer(encoder, tmp_path / "changed", {"strip_accents": strips})
    convert(changed, tmp_path / "model.gguf")
    metadata = GGUFFile.open(tmp_path / "model.gguf").metadata
    assert metadata.get("tokenizer.ggml.normalizer.strip_accents") is strips


def with_normalizer(folder: Path, target: Path, changes: dict[str, Any]) -> Path:
    changed = copy(folder, target)
    path = changed / "tokenizer.json"
    tokenizer = json.loads(path.read_text())
    tokenizer["normalizer"] |= changes
    path.write_text(json.dumps(tokenizer))
    return changed
