"""Folders and arguments that the converter refuses, and clean-up after errors."""

import json
import resource
import shutil
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from random import Random
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from model_zoo.convert.convert_folder import convert
from runtime.errors import CaravanError, ConfigurationError, ModelFileError, UnsupportedModelError
from tests.unit.model_zoo.convert.checkpoint_changes import (
    INDEX,
    SHARD,
    reshaped,
    settings,
    sharded,
)


def unknown_tensor(folder: Path) -> None:
    reshaped(folder, lambda w: w.update({"model.layers.0.mlp.extra.weight": torch.ones(2)}))


def endless_layer_number(folder: Path) -> None:
    name = f"model.layers.{'9' * 5000}.self_attn.q_proj.weight"
    reshaped(folder, lambda w: w.update({name: torch.ones(64, 64)}))


def lost_tensor(folder: Path) -> None:
    reshaped(folder, lambda w: w.pop("model.layers.1.self_attn.k_proj.weight"))


def lost_head(folder: Path) -> None:
    reshaped(folder, lambda w: w.pop("lm_head.weight"))


def stored_twice(folder: Path) -> None:
    name = "model.norm.weight"
    reshaped(folder, lambda w: w.update({f"language_{name}": w[name].clone()}))


def endless_number(folder: Path) -> None:
    settings(folder, rms_norm_eps=1e300)


def one_layer_too_many(folder: Path) -> None:
    settings(folder, num_hidden_layers=1)


def odd_rows(folder: Path) -> None:
    name = "model.layers.0.self_attn.q_proj.weight"
    reshaped(folder, lambda w: w.update({name: torch.ones(63, 64)}))


def not_finite(folder: Path) -> None:
    name = "model.layers.1.mlp.down_proj.weight"
    reshaped(folder, lambda w: w.update({name: torch.full((64, 96), torch.nan)}))


def too_large_for_half(folder: Path) -> None:
    name = "model.layers.1.mlp.down_proj.weight"
    reshaped(folder, lambda w: w.update({name: torch.full((64, 96), 1e6)}))


def eight_bits(folder: Path) -> None:
    name = "model.layers.1.mlp.down_proj.weight"
    reshaped(folder, lambda w: w.update({name: w[name].to(torch.float8_e4m3fn)}))


def integers(folder: Path) -> None:
    name = "model.layers.1.mlp.down_proj.weight"
    reshaped(folder, lambda w: w.update({name: torch.ones(64, 96, dtype=torch.int8)}))


def lost_shard(folder: Path) -> None:
    sharded(folder)
    (folder / SHARD).unlink()


def shard_without_its_tensors(folder: Path) -> None:
    sharded(folder)
    save_file({"nothing": torch.ones(1)}, folder / SHARD)


def index_to_elsewhere(folder: Path) -> None:
    (folder / INDEX).write_text(json.dumps({"weight_map": {"a": "../secret.safetensors"}}))


def empty_index(folder: Path) -> None:
    (folder / INDEX).write_text("{}")


def damaged_weights(folder: Path) -> None:
    path = folder / "model.safetensors"
    path.write_bytes(path.read_bytes()[:1000])


def pickles(folder: Path) -> None:
    (folder / "model.safetensors").rename(folder / "pytorch_model.bin")


def no_weights(folder: Path) -> None:
    (folder / "model.safetensors").unlink()


def no_settings(folder: Path) -> None:
    (folder / "config.json").unlink()


def settings_that_are_no_json(folder: Path) -> None:
    (folder / "config.json").write_text("{")


def settings_that_are_a_list(folder: Path) -> None:
    (folder / "config.json").write_text("[]")


def other_architecture(folder: Path) -> None:
    settings(folder, architectures=["WhisperForConditionalGeneration"])


def no_architecture(folder: Path) -> None:
    settings(folder, architectures=None)


def size_that_is_text(folder: Path) -> None:
    settings(folder, hidden_size="64")


def condition_that_is_text(folder: Path) -> None:
    """Which layers have experts decides which tensors they need."""
    architecture = ["Ernie4_5_MoeForCausalLM"]
    settings(folder, architectures=architecture, moe_layer_interval=1, moe_layer_start_index="1")


def endless_layers(folder: Path) -> None:
    settings(folder, num_hidden_layers=10**9)


def endless_heads(folder: Path) -> None:
    settings(folder, head_dim=10**12)


def no_size(folder: Path) -> None:
    settings(folder, intermediate_size=None)


def unknown_scaling(folder: Path) -> None:
    settings(folder, rope_parameters={"rope_type": "dynamic", "factor": 2.0})


def scaling_without_numbers(folder: Path) -> None:
    settings(folder, rope_parameters={"rope_type": "llama3"})


def quantised_by_others(folder: Path) -> None:
    settings(folder, quantization_config={"quant_method": "bitsandbytes", "load_in_4bit": True})


def empty_tensor(folder: Path) -> None:
    reshaped(folder, lambda w: w.update({"model.norm.weight": torch.ones(0)}))


def number_for_a_matrix(folder: Path) -> None:
    name = "model.layers.1.mlp.down_proj.weight"
    reshaped(folder, lambda w: w.update({name: torch.tensor(1.0)}))


def endless_number_in_a_list(folder: Path) -> None:
    settings(folder, intermediate_size=[1 << 31, 96])


def sampling(folder: Path, **stated: object) -> None:
    (folder / "generation_config.json").write_text(json.dumps(stated))


def endless_temperature(folder: Path) -> None:
    sampling(folder, temperature=1e300)


def endless_top_k(folder: Path) -> None:
    sampling(folder, top_k=1 << 40)


def top_k_that_is_no_number(folder: Path) -> None:
    sampling(folder, top_k=float("nan"))


def template_in_latin_1(folder: Path) -> None:
    (folder / "chat_template.jinja").write_bytes("Très bien".encode("latin-1"))


def template_that_is_a_folder(folder: Path) -> None:
    (folder / "chat_template.jinja").unlink()
    (folder / "chat_template.jinja").mkdir()


def no_tokenizer(folder: Path) -> None:
    (folder / "tokenizer.json").unlink()


REFUSED = {
    unknown_tensor: (ModelFileError, r"does not know: model\.layers\.0\.mlp\.extra\.weight"),
    endless_layer_number: (ModelFileError, r"does not know: model\.layers\.9999"),
    lost_tensor: (ModelFileError, r"needs: layers\.1\.self_attn\.k_proj\.weight"),
    lost_head: (ModelFileError, r"needs: lm_head\.weight"),
    stored_twice: (ModelFileError, r"norm\.weight` are stored for the same tensor"),
    endless_number: (ModelFileError, r"has '1e\+300' where a number is needed"),
    one_layer_too_many: (ModelFileError, r"states 1 layers, but there is .*layers\.1\."),
    odd_rows: (ModelFileError, r"has 4 as `num_attention_heads`, but there are 63 rows"),
    not_finite: (ModelFileError, r"`blk\.1\.ffn_down\.weight` holds weights that are not finite"),
    too_large_for_half: (ModelFileError, r"`blk\.1\.ffn_down\.weight` .* F16 can hold 65504"),
    eight_bits: (UnsupportedModelError, r"down_proj\.weight` holds numbers of type F8_E4M3"),
    integers: (UnsupportedModelError, r"down_proj\.weight` .* type I8"),
    lost_shard: (ModelFileError, f"{SHARD}: this shard of the checkpoint is missing"),
    shard_without_its_tensors: (ModelFileError, f"{SHARD}: the index says that it has lm_head"),
    index_to_elsewhere: (ModelFileError, "`a` is in no file of this folder"),
    empty_index: (ModelFileError, "has no `weight_map`"),
    damaged_weights: (ModelFileError, "is no sound safetensors file"),
    pickles: (UnsupportedModelError, "its weights are pickles"),
    no_weights: (ModelFileError, "has neither `model.safetensors` nor"),
    no_settings: (ModelFileError, "config.json: there is no such file"),
    settings_that_are_no_json: (ModelFileError, "config.json: cannot be read as JSON"),
    settings_that_are_a_list: (ModelFileError, "config.json: holds no JSON object"),
    other_architecture: (UnsupportedModelError, r"\(WhisperForConditionalGeneration\) cannot be"),
    no_architecture: (UnsupportedModelError, r"the architecture \(none\) cannot be converted"),
    size_that_is_text: (ModelFileError, "has '64' "),
    condition_that_is_text: (ModelFileError, "does not determine `blk.*TypeError"),
    endless_layers: (ModelFileError, "has 1,000,000,000 layers; 1,024 is the limit"),
    endless_heads: (ModelFileError, "has heads of 1,000,000,000,000 elements; 4,096 is the limit"),
    no_size: (ModelFileError, "has no `intermediate_size`"),
    unknown_scaling: (UnsupportedModelError, "the rope scaling dynamic is not supported"),
    scaling_without_numbers: (ModelFileError, "does not determine `rope_freqs.weight`"),
    quantised_by_others: (UnsupportedModelError, r"its weights are quantised \(bitsandbytes\)"),
    number_for_a_matrix: (ModelFileError, r"down_proj\.weight` has the shape \(\), which"),
    empty_tensor: (ModelFileError, r"`model\.norm\.weight` is empty"),
    endless_number_in_a_list: (ModelFileError, r"states \[2147483648, 96\] for `llama\.feed_forw"),
    endless_temperature: (ModelFileError, r"states 1e\+300 for `general\.sampling\.temp`"),
    endless_top_k: (ModelFileError, r"1099511627776 for `general\.sampling\.top_k`.* int32"),
    top_k_that_is_no_number: (ModelFileError, r"generation_config\.json: has nan as `top_k`"),
    template_in_latin_1: (ModelFileError, r"chat_template\.jinja: cannot be read as text"),
    template_that_is_a_folder: (ModelFileError, r"chat_template\.jinja: cannot be read as text"),
    no_tokenizer: (ModelFileError, "tokenizer.json: is missing, as is tokenizer.model"),
}


@pytest.mark.parametrize("damage", REFUSED, ids=lambda damage: damage.__name__)
def test_a_damaged_folder_is_refused_and_leaves_no_file(damage, copied, tmp_path) -> None:
    damage(copied)
    out = tmp_path / "out"
    out.mkdir()
    kind, said = REFUSED[damage]
    with pytest.raises(kind, match=said) as refused:
        convert(copied, out / "model.gguf")
    assert type(refused.value) is kind
    assert list(out.iterdir()) == []


def test_an_error_during_writing_keeps_the_existing_file(copied, tmp_path) -> None:
    out = tmp_path / "out"
    out.mkdir()
    [older] = convert(copied, out / "model.gguf")
    kept = {older: older.read_bytes()}
    not_finite(copied)
    with pytest.raises(ModelFileError):
        convert(copied, out / "model.gguf")
    assert {path: path.read_bytes() for path in out.iterdir()} == kept


@contextmanager
def files_of_at_most(nbytes: int) -> Iterator[None]:
    """As a disk that is full after that many bytes of a file."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (nbytes, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


@pytest.mark.parametrize("missing", [1, 40_000, 100_000])
def test_nothing_remains_when_the_disk_is_full(missing, folder, tmp_path) -> None:
    """The last bytes may still be in a buffer when the file is closed."""
    [whole] = convert(folder, tmp_path / "whole.gguf")
    out = tmp_path / "out"
    out.mkdir()
    refused = pytest.raises(ConfigurationError, match=r"model\.gguf: cannot be written: File")
    with files_of_at_most(whole.stat().st_size - missing), refused:
        convert(folder, out / "model.gguf")
    assert list(out.iterdir()) == []


SETTINGS = ("config.json", "tokenizer.json", "tokenizer_config.json", "generation_config.json")
STRANGE = (None, -1, 1.5, "x", [], {}, [1], ["a"], {"a": 1}, True, 10**30, 1e308, [[1]], "../x")


def places(value: Any, depth: int = 0) -> Iterator[tuple[Any, Any]]:
    """Every container in a JSON value with each of its keys; for long lists the first ones."""
    keys: Any = value if isinstance(value, dict) else ()
    keys = range(min(len(value), 5)) if isinstance(value, list) else keys
    for key in keys:
        yield value, key
        if depth < 6:
            yield from places(value[key], depth + 1)


def test_invalid_settings_raise_only_documented_errors(copied, tmp_path) -> None:
    random, out = Random(1), tmp_path / "out.gguf"
    originals = {name: (copied / name).read_text() for name in SETTINGS}
    outcomes: Counter[str] = Counter()
    for _ in range(150):
        name = random.choice(SETTINGS)
        values = json.loads(originals[name])
        container, key = random.choice(list(places(values)))
        container[key] = random.choice(STRANGE)
        (copied / name).write_text(json.dumps(values))
        try:
            convert(copied, out)
            outcomes["converted"] += 1
            out.unlink()
        except CaravanError:
            outcomes["refused"] += 1
            assert not list(tmp_path.glob("*.gguf*"))
        (copied / name).write_text(originals[name])
    assert min(outcomes["converted"], outcomes["refused"]) > 25


def bad_requests(folder: Path, tmp_path: Path) -> Iterator[tuple[dict, str]]:
    good = {"folder": folder, "out": tmp_path / "out.gguf"}
    yield good | {"type": "q4_k_n"}, "q4_k_m"
    yield good | {"flavour": "vllm"}, "flavour vllm is not known; known are llama.cpp, ollama"
    yield good | {"folder": folder / "config.json"}, "config.json is not a folder"
    yield good | {"folder": folder / "nowhere"}, "nowhere is not a folder"
    yield good | {"out": tmp_path}, "is not a valid file"
    yield good | {"out": tmp_path / "nowhere" / "out.gguf"}, "is not a valid file"
    for name in ("model.safetensors", "config.json"):
        yield good | {"out": folder / name}, f"{name}: is a file of the checkpoint"


def test_invalid_arguments_are_refused_before_reading(folder, tmp_path) -> None:
    for request, said in bad_requests(folder, tmp_path):
        with pytest.raises(ConfigurationError, match=said):
            convert(**request)
    assert list(tmp_path.iterdir()) == []


def test_too_little_disk_space_is_reported_before_writing(folder, tmp_path, monkeypatch) -> None:
    usage = shutil.disk_usage(tmp_path)._replace(free=1000)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage)
    with pytest.raises(
        ConfigurationError, match=r"needs 2.*,.* bytes, but its disk has only 1,000"
    ):
        convert(folder, tmp_path / "out.gguf")
    assert list(tmp_path.iterdir()) == []


def test_an_unwritable_folder_is_reported(folder, tmp_path) -> None:
    name = "x" * 250  # its name while it is written is longer still
    with pytest.raises(CaravanError, match="cannot be written: File name too long"):
        convert(folder, tmp_path / name)
