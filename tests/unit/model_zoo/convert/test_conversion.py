"""Conversion of folders of safetensors to GGUF: content of the files, and clean-up."""

import json
import weakref

import gguf
import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import LlamaConfig

from model_zoo.convert.checkpoint_reader import Checkpoint
from model_zoo.convert.convert_folder import convert
from model_zoo.gguf.reader import GGUFFile
from model_zoo.registry import load
from runtime.errors import ModelFileError
from tests.families.text_families import TEXT_MODELS
from tests.gguf_files import block_types, matrices
from tests.tiny_models import (
    CHAT_TEMPLATE,
    tiny_tokenizer,
    write_tiny_folder,
)
from tests.unit.model_zoo.convert.checkpoint_changes import (
    INDEX,
    SIZES,
    copy,
    reshaped,
    settings,
    sharded,
)


def test_metadata_match_the_settings_of_the_folder(folder, tmp_path) -> None:
    convert(folder, tmp_path / "out.gguf")
    description = load(
        tmp_path / "out.gguf", device=torch.device("cpu"), dtype=torch.float32
    ).description
    assert (description.name, description.license) == ("Tiny-1B", "apache-2.0")
    assert (description.architecture, description.quantization) == ("llama", "F16")
    assert description.chat_template == CHAT_TEMPLATE
    assert description.vocab_size == tiny_tokenizer().get_vocab_size()
    metadata = GGUFFile.open(tmp_path / "out.gguf").metadata
    assert metadata["general.type"] == "model"
    assert metadata["tokenizer.ggml.tokens"][320] == "<|im_end|>"


def test_sampling_settings_are_converted(copied, tmp_path) -> None:
    stated = {"temperature": 0.6, "top_k": 20, "top_p": 0.95, "do_sample": True}
    (copied / "generation_config.json").write_text(json.dumps(stated))
    convert(copied, tmp_path / "out.gguf")
    fields = gguf.GGUFReader(tmp_path / "out.gguf").fields
    found = {
        name.removeprefix("general.sampling."): field.contents()
        for name, field in fields.items()
        if name.startswith("general.sampling.")
    }
    assert found == {"temp": pytest.approx(0.6), "top_k": 20, "top_p": pytest.approx(0.95)}
    assert fields["general.sampling.top_k"].types == [gguf.GGUFValueType.INT32]


def test_a_snapshot_in_a_download_cache_has_the_name_of_its_model(folder, tmp_path) -> None:
    snapshot = tmp_path / "models--someone--Some-Model-7B" / "snapshots" / "0a1b2c3d"
    copy(folder, snapshot)
    convert(snapshot, tmp_path / "out.gguf")
    assert GGUFFile.open(tmp_path / "out.gguf").metadata["general.name"] == "Some-Model-7B"


@pytest.mark.parametrize("stored", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("type", ["f32", "f16", "bf16"])
def test_weights_are_rounded_once(stored, type, copied, tmp_path) -> None:
    reshaped(copied, lambda weights: weights.update({n: w.to(stored) for n, w in weights.items()}))
    convert(copied, tmp_path / "out.gguf", type=type)
    weights = load_file(copied / "model.safetensors")
    kept = {"f32": torch.float32, "f16": torch.float16, "bf16": torch.bfloat16}[type]
    found = matrices(tmp_path / "out.gguf")
    expected = weights["model.layers.1.mlp.down_proj.weight"].float().to(kept).float()
    assert np.array_equal(found["blk.1.ffn_down.weight"], expected.numpy())
    norm = weights["model.layers.1.input_layernorm.weight"].float()
    assert np.array_equal(found["blk.1.attn_norm.weight"], norm.numpy())


@pytest.mark.parametrize("type", ["q8_0", "Q4_0", "q4_k_m", "q6_k"])
def test_quantised_files_load_with_small_errors(type, tmp_path) -> None:
    wide = LlamaConfig(**SIZES | {"hidden_size": 256, "intermediate_size": 256})
    write_tiny_folder(tmp_path / "folder", wide)
    convert(tmp_path / "folder", tmp_path / "out.gguf", type=type)
    convert(tmp_path / "folder", tmp_path / "plain.gguf", type="f32")
    model = load(tmp_path / "out.gguf", device=torch.device("cpu"), dtype=torch.float32)
    assert model.description.quantization == type.upper()
    found = block_types(tmp_path / "out.gguf")
    assert found["blk.0.ffn_up.weight"] == {"q4_k_m": "Q4_K"}.get(type, type.upper())
    assert found["blk.0.ffn_norm.weight"] == "F32"
    plain = matrices(tmp_path / "plain.gguf")
    for name, array in matrices(tmp_path / "out.gguf").items():
        assert np.abs(array - plain[name]).mean() <= 0.1 * np.abs(plain[name]).mean(), name


def test_shards_give_the_same_file_as_a_single_one(folder, copied, tmp_path) -> None:
    sharded(copied)
    convert(folder, tmp_path / "one.gguf")
    convert(copied, tmp_path / "shards.gguf")
    assert (tmp_path / "one.gguf").read_bytes() == (tmp_path / "shards.gguf").read_bytes()


def test_a_file_in_the_folder_of_the_checkpoint_is_replaced(copied) -> None:
    for type in ("f16", "q8_0"):
        [path] = convert(copied, copied / "model.gguf", type=type)
        assert block_types(path)["blk.0.ffn_up.weight"] == type.upper()


def test_a_tensor_in_two_shards_is_that_of_the_index(folder, copied, tmp_path) -> None:
    sharded(copied)
    name = "model.norm.weight"
    own = json.loads((copied / INDEX).read_text())["weight_map"][name]
    [other] = [path for path in copied.glob("*.safetensors") if path.name != own]
    save_file({**load_file(other), name: torch.full((64,), 7.0)}, other)
    for source, out in ((folder, "plain"), (copied, "found")):
        convert(source, tmp_path / out)
    assert (tmp_path / "plain").read_bytes() == (tmp_path / "found").read_bytes()


def test_layers_for_drafting_tokens_are_left_out(folder, copied, tmp_path) -> None:
    """They follow the layers that the settings count."""
    drafting = {
        "model.layers.2.eh_proj.weight": torch.ones(64, 128),
        "model.layers.2.self_attn.q_proj.weight": torch.ones(64, 64),
    }
    reshaped(copied, lambda weights: weights.update(drafting))
    settings(copied, num_nextn_predict_layers=1)
    for source, name in ((folder, "plain"), (copied, "drafting")):
        convert(source, tmp_path / f"{name}.gguf")
    plain, found = (matrices(tmp_path / f"{name}.gguf") for name in ("plain", "drafting"))
    assert plain.keys() == found.keys()


@pytest.mark.parametrize("family", ["lfm2", "granitehybrid", "nemotron_h"])
def test_tensors_of_more_layers_than_the_settings_list_are_refused(family, tmp_path) -> None:
    folder, config = tmp_path / "folder", TEXT_MODELS[family].config()
    write_tiny_folder(folder, config)
    first = next(n for n in load_file(folder / "model.safetensors") if ".layers.0." in n)
    layers = config.num_hidden_layers
    further = first.replace(".layers.0.", f".layers.{layers}.")
    reshaped(folder, lambda weights: weights.update({further: weights[first].clone()}))
    with pytest.raises(
        ModelFileError, match=rf"states {layers} layers, but there is .*layers\.{layers}\."
    ):
        convert(folder, tmp_path / "out.gguf")


@pytest.mark.parametrize("family", ["apertus", "dots1", "gpt-oss", "minimax-m2", "olmo2", "olmoe"])
def test_a_tied_head_is_written_for_readers_that_require_one(family, tmp_path) -> None:
    folder = tmp_path / "folder"
    write_tiny_folder(folder, TEXT_MODELS[family].config(tie_word_embeddings=True))
    convert(folder, tmp_path / "out.gguf", type="q8_0")
    found = matrices(tmp_path / "out.gguf")
    assert np.array_equal(found["output.weight"], found["token_embd.weight"])


def test_numbers_of_layers_become_keys(tmp_path) -> None:
    folder, out = tmp_path / "folder", tmp_path / "out.gguf"
    write_tiny_folder(folder, TEXT_MODELS["apertus"].config())
    convert(folder, out)
    weights = load_file(folder / "model.safetensors")
    stored = [weights[f"model.layers.{layer}.mlp.act_fn.alpha_n"].item() for layer in range(2)]
    assert GGUFFile.open(out).metadata["xielu.alpha_n"] == pytest.approx(stored)
    assert not any("act_fn" in name for name in matrices(out))


@pytest.mark.parametrize(
    "number, said",
    [
        (None, r"needs: layers\.1\.mlp\.act_fn\.beta"),
        (torch.ones(2), "is not a finite number"),
        (torch.tensor(torch.nan), "is not a finite number"),
    ],
)
def test_layers_without_their_numbers_are_refused(number, said, tmp_path) -> None:
    name = "model.layers.1.mlp.act_fn.beta"
    write_tiny_folder(tmp_path, TEXT_MODELS["apertus"].config())
    if number is None:
        reshaped(tmp_path, lambda weights: weights.pop(name))
    else:
        reshaped(tmp_path, lambda weights: weights.update({name: number}))
    with pytest.raises(ModelFileError, match=said):
        convert(tmp_path, tmp_path / "out.gguf")


def test_progress_counts_the_bytes_of_all_tensors(folder, tmp_path) -> None:
    calls: list[tuple[int, int]] = []
    convert(folder, tmp_path / "out.gguf", progress=lambda done, total: calls.append((done, total)))
    total = sum(tensor.n_bytes for tensor in gguf.GGUFReader(tmp_path / "out.gguf").tensors)
    assert [done for done, _ in calls] == sorted({done for done, _ in calls})
    assert {of for _, of in calls} == {total} and calls[-1][0] == total


@pytest.mark.parametrize("family", ["llama", "mixtral"])
def test_never_more_than_one_stored_tensor_is_in_memory(family, tmp_path, monkeypatch) -> None:
    write_tiny_folder(tmp_path / "folder", TEXT_MODELS[family].config())
    alive: list[weakref.ref] = []
    read = Checkpoint.read

    def watched(self, name, *, index=None):
        assert not any(tensor() is not None for tensor in alive), name
        tensor = read(self, name, index=index)
        alive.append(weakref.ref(tensor))
        return tensor

    monkeypatch.setattr(Checkpoint, "read", watched)
    convert(tmp_path / "folder", tmp_path / "out.gguf", type="q8_0")
    assert len(alive) > 20
