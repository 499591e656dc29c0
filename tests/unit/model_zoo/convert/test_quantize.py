"""Quantising files: what is kept, changed and refused, and clean-up after errors."""

import math
from pathlib import Path

import gguf
import numpy as np
import pytest
import torch
from gguf import GGMLQuantizationType, GGUFValueType

from model_zoo.convert.quantize import facts_of, quantize_file
from model_zoo.convert.recipes import Facts
from model_zoo.gguf.reader import GGUFFile
from model_zoo.registry import load
from runtime.errors import ConfigurationError, ModelFileError
from tests.gguf_files import block_types, finish, matrices, rewrite, values_with_types
from tests.tiny_models import TinyLlama, write_tiny_llama

WIDE = TinyLlama(hidden=256, layers=8, heads=8, kv_heads=2, head_dim=32, feed_forward=512)
SCALARS = {
    GGUFValueType.UINT8: 200,
    GGUFValueType.INT8: -100,
    GGUFValueType.UINT16: 60_000,
    GGUFValueType.INT16: -30_000,
    GGUFValueType.UINT32: 4_000_000_000,
    GGUFValueType.INT32: -2_000_000_000,
    GGUFValueType.FLOAT32: 0.1,
    GGUFValueType.BOOL: True,
    GGUFValueType.STRING: "Grüße, 世界",
    GGUFValueType.UINT64: 1 << 63,
    GGUFValueType.INT64: -(1 << 62),
    GGUFValueType.FLOAT64: 0.1,
}


@pytest.fixture(scope="module")
def source(tmp_path_factory) -> Path:
    path = tmp_path_factory.mktemp("source") / "tiny.gguf"
    write_tiny_llama(path, config=WIDE, type="F16")
    return path


def write_tensors(path: Path, tensors: dict[str, np.ndarray], *, alignment: int = 32) -> Path:
    """A file of an invented architecture with a value and an array of every type."""
    writer = gguf.GGUFWriter(path, "made-up")
    writer.add_custom_alignment(alignment)
    for kind, value in SCALARS.items():
        writer.add_key_value(f"one.{kind.name}", value, kind)
        writer.add_key_value(f"many.{kind.name}", [value, value], GGUFValueType.ARRAY, kind)
    for name, array in tensors.items():
        writer.add_tensor(name, array)
    finish(writer)
    return path


def normal(*shape: int) -> np.ndarray:
    return np.random.default_rng(0).normal(size=shape).astype(np.float32)


@pytest.mark.parametrize("recipe", ["q4_k_m", "q8_0", "q4_0", "bf16", "f32"])
def test_the_result_is_a_model_with_the_same_tensors(source, tmp_path, recipe):
    out = quantize_file(source, tmp_path / "q.gguf", recipe)
    before, after = matrices(source), matrices(out)
    assert list(before) == list(after)
    for name, expected in before.items():
        error = np.square(after[name] - expected).mean() / np.square(expected).mean()
        assert after[name].shape == expected.shape and error < 0.01, name
    assert load(out, device=torch.device("cpu"), dtype=torch.float32).decoder.vocab_size > 0


def test_a_medium_recipe_mixes_types_in_the_file(source, tmp_path):
    kinds = block_types(quantize_file(source, tmp_path / "q.gguf", "q4_k_m"))
    assert kinds["output.weight"] == kinds["blk.0.ffn_down.weight"] == "Q6_K"
    assert kinds["blk.1.ffn_down.weight"] == kinds["token_embd.weight"] == "Q4_K"
    assert kinds["blk.0.attn_norm.weight"] == "F32"


def test_the_tokenizer_and_all_other_metadata_are_kept(source, tmp_path):
    out = quantize_file(source, tmp_path / "q.gguf", "q5_k_m")
    before, after = values_with_types(source), values_with_types(out)
    file_type = [GGUFValueType.UINT32], gguf.LlamaFileType.MOSTLY_Q5_K_M
    assert after.pop("general.file_type") == file_type
    assert after.pop("general.quantization_version") == ([GGUFValueType.UINT32], 2)
    before.pop("general.quantization_version", None)
    assert after == before and "tokenizer.ggml.tokens" in after


def test_every_type_of_value_is_kept(tmp_path):
    source = write_tensors(tmp_path / "s.gguf", {"a.weight": normal(2, 32)})
    before = values_with_types(source)
    after = values_with_types(quantize_file(source, tmp_path / "q.gguf", "q8_0"))
    for key, value in before.items():
        assert after.get(key) == value or key == "general.alignment"


def test_the_alignment_of_the_source_is_not_copied(tmp_path):
    arrays = {"a.weight": normal(1, 32), "b.weight": normal(3, 32)}
    source = write_tensors(tmp_path / "s.gguf", arrays, alignment=256)
    read = matrices(quantize_file(source, tmp_path / "q.gguf", "f32"))
    assert all((read[name] == array).all() for name, array in arrays.items())


def test_tensors_that_need_no_change_are_copied_bit_by_bit(source, tmp_path):
    out = quantize_file(source, tmp_path / "q.gguf", "f16")
    before, after = (gguf.GGUFReader(path).tensors for path in (source, out))
    for old, new in zip(before, after, strict=True):
        assert old.tensor_type == new.tensor_type and (old.data == new.data).all(), old.name


def test_integers_and_bfloat16_of_two_byte_tensors_are_kept(tmp_path):
    writer = gguf.GGUFWriter(tmp_path / "s.gguf", "made-up")
    writer.add_tensor("blk.0.ids.weight", np.arange(64, dtype=np.int32).reshape(2, 32))
    bf16 = gguf.quants.quantize(normal(2, 32), GGMLQuantizationType.BF16)
    writer.add_tensor("v.blk.0.attn_q.weight", bf16, raw_dtype=GGMLQuantizationType.BF16)
    finish(writer)
    out = quantize_file(tmp_path / "s.gguf", tmp_path / "q.gguf", "q8_0")
    assert block_types(out) == {"blk.0.ids.weight": "I32", "v.blk.0.attn_q.weight": "BF16"}
    assert (gguf.GGUFReader(out).tensors[0].data.ravel() == np.arange(64)).all()


def test_tensors_without_weights_are_kept(tmp_path):
    shapes = {"blk.0.a.weight": (0, 64), "blk.0.b.weight": (4, 64), "blk.0.c.weight": (0,)}
    source = write_tensors(tmp_path / "s.gguf", {n: normal(*shape) for n, shape in shapes.items()})
    file = GGUFFile.open(quantize_file(source, tmp_path / "q.gguf", "q8_0"))
    assert {name: info.shape for name, info in file.tensors.items()} == shapes
    assert file.weight("blk.0.b.weight").type.name == "Q8_0"


def test_a_split_model_becomes_one_file(source, tmp_path):
    tensors = [tensor.name for tensor in gguf.GGUFReader(source).tensors]
    writer = gguf.GGUFWriter(
        tmp_path / "m.gguf", "llama", split_max_tensors=len(tensors) // 2, use_temp_file=False
    )
    for key, field in gguf.GGUFReader(source).fields.items():
        if not key.startswith("GGUF.") and key != "general.architecture":
            kinds = [*field.types, None]
            writer.add_key_value(key, field.contents(), kinds[0], kinds[1])
    for tensor in gguf.GGUFReader(source).tensors:
        writer.add_tensor(tensor.name, tensor.data, raw_dtype=tensor.tensor_type)
    finish(writer)
    first = min(tmp_path.glob("m-00001-of-*.gguf"))
    out = quantize_file(first, tmp_path / "q.gguf", "q8_0")
    whole = quantize_file(source, tmp_path / "whole.gguf", "q8_0")
    assert out.read_bytes() == whole.read_bytes()
    parts = {path: path.read_bytes() for path in tmp_path.glob("m-*.gguf")}
    for part in parts:
        with pytest.raises(ConfigurationError, match="is the source itself"):
            quantize_file(first, part, "q8_0")
    assert {path: path.read_bytes() for path in parts} == parts and len(parts) > 1


def test_a_quantised_file_is_refused_unless_allowed(source, tmp_path):
    once = quantize_file(source, tmp_path / "once.gguf", "q8_0")
    with pytest.raises(ModelFileError, match=r"`\S+` is Q8_0, quantised already"):
        quantize_file(once, tmp_path / "twice.gguf", "q4_0")
    assert not (tmp_path / "twice.gguf").exists()
    twice = quantize_file(once, tmp_path / "twice.gguf", "q4_0", allow_requantize=True)
    assert block_types(twice)["blk.0.attn_q.weight"] == "Q4_0"


def test_progress_counts_the_bytes_of_the_source(source, tmp_path):
    heard: list[tuple[int, int]] = []
    quantize_file(source, tmp_path / "q.gguf", "q8_0", progress=lambda *told: heard.append(told))
    total = sum(info.nbytes for info in GGUFFile.open(source).tensors.values())
    done = [count for count, _ in heard]
    assert done == sorted(done) and done[-1] == total
    assert {of for _, of in heard} == {total} and len(heard) >= len(block_types(source))


def test_tensors_larger_than_a_group_of_rows_are_complete(tmp_path, monkeypatch):
    monkeypatch.setattr("model_zoo.convert.quantize._CHUNK", 1000)
    array = normal(3, 5, 320)
    source = write_tensors(tmp_path / "s.gguf", {"blk.0.ffn_up_exps.weight": array})
    read = matrices(quantize_file(source, tmp_path / "q.gguf", "q8_0"))
    expected = gguf.quants.quantize(array, GGMLQuantizationType.Q8_0)
    expected = gguf.quants.dequantize(expected, GGMLQuantizationType.Q8_0)
    assert (read["blk.0.ffn_up_exps.weight"] == expected).all()


def test_invalid_weights_are_reported_and_leave_no_file(source, tmp_path):
    ruined = normal(512, 256)
    ruined[300, 7] = np.nan
    changes = {"blk.3.ffn_up.weight": ruined}
    damaged = rewrite(source, tmp_path / "damaged.gguf", tensors=changes)
    with pytest.raises(ModelFileError, match=r"`blk.3.ffn_up.weight` holds .* not finite"):
        quantize_file(damaged, tmp_path / "q.gguf", "q4_k_m")
    assert [path.name for path in tmp_path.iterdir()] == ["damaged.gguf"]


def test_a_failure_keeps_the_existing_file(source, tmp_path):
    out = quantize_file(source, tmp_path / "q.gguf", "q8_0")
    before = out.read_bytes()
    ruined = {"blk.3.ffn_up.weight": np.full((512, 256), np.inf, np.float32)}
    damaged = rewrite(source, tmp_path / "damaged.gguf", tensors=ruined)
    with pytest.raises(ModelFileError, match="not finite"):
        quantize_file(damaged, out, "q4_k_m")
    assert out.read_bytes() == before


def test_the_source_is_not_overwritten(source, tmp_path):
    before = source.read_bytes()
    link = tmp_path / "link.gguf"
    link.symlink_to(source)
    for out in (source, link):
        with pytest.raises(ConfigurationError, match="is the source itself"):
            quantize_file(source, out, "q8_0")
    assert source.read_bytes() == before


def test_invalid_arguments_are_reported_before_reading_or_writing(source, tmp_path):
    with pytest.raises(ConfigurationError, match="There is no recipe `q9`"):
        quantize_file(tmp_path / "absent.gguf", tmp_path / "q.gguf", "q9")
    with pytest.raises(ModelFileError, match="there is no such file"):
        quantize_file(tmp_path / "absent.gguf", tmp_path / "q.gguf", "q8_0")
    with pytest.raises(ConfigurationError, match="there is no directory"):
        quantize_file(source, tmp_path / "absent" / "q.gguf", "q8_0")
    assert list(tmp_path.iterdir()) == []


def test_the_same_file_gives_the_same_bytes(source, tmp_path):
    first, second = (quantize_file(source, tmp_path / name, "q4_k_s") for name in ("a", "b"))
    assert first.read_bytes() == second.read_bytes()


def test_facts_come_from_the_file(source, tmp_path):
    assert facts_of(GGUFFile.open(source)) == Facts(layers=8, kv_sharing=4)
    keys = {"llama.expert_count": 8, "llama.attention.head_count_kv": [0, 2, 0, 2, 2, 2, 2, 2]}
    changed = rewrite(source, tmp_path / "c.gguf", keys=keys, tensors={"output.weight": None})
    expected = Facts(layers=8, experts=8, kv_sharing=4, tied=True)
    assert facts_of(GGUFFile.open(changed)) == expected
    keys["llama.attention.head_count_kv"] = [math.inf] * 8
    endless = rewrite(source, tmp_path / "e.gguf", keys=keys)
    assert facts_of(GGUFFile.open(endless)) == Facts(layers=8, experts=8)
