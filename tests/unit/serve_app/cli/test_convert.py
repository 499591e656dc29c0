"""`caravan convert` and `quantize`, checked with `show` and the reference reader."""

import json
from pathlib import Path

import gguf
import pytest
from transformers import LlamaConfig

from tests.tiny_models import write_tiny_folder, write_tiny_llama
from tests.unit.serve_app.cli.cli_runs import run, said


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    path = tmp_path_factory.mktemp("checkpoint")
    config = LlamaConfig(
        hidden_size=64,
        intermediate_size=96,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=512,
    )
    write_tiny_folder(path, config)
    return path


def types(path: Path) -> set[str]:
    """The types of matrices that the reference reader finds."""
    tensors = gguf.GGUFReader(path).tensors
    return {tensor.tensor_type.name for tensor in tensors if len(tensor.shape) > 1}


def test_convert_writes_a_file_that_can_be_served(folder, tmp_path):
    out = tmp_path / "out.gguf"
    result = run("convert", folder, out, "--type", "Q8_0")
    assert result.stdout == f"{out}: {out.stat().st_size / 1000:.1f} kB\n"
    assert "converting: 100% of" in result.stderr
    assert types(out) == {"Q8_0"}
    reported = said("show", out)
    assert (reported["architecture"], reported["quantization"]) == ("llama", "Q8_0")
    assert reported["supported"] is True and reported["context_length"] == 512


def test_convert_writes_one_json_object_a_line(folder, tmp_path):
    out = tmp_path / "out.gguf"
    steps = [json.loads(line) for line in run("convert", folder, out, "--json").stdout.splitlines()]
    assert steps[-1] == {"written": str(out), "bytes": out.stat().st_size}
    assert steps[-2]["completed"] == steps[-2]["total"] > 0
    assert types(out) == {"F16"}


def test_quantize_makes_a_file_smaller(tmp_path):
    source, out = tmp_path / "f32.gguf", tmp_path / "q4_0.gguf"
    write_tiny_llama(source, type="F32")
    steps = [
        json.loads(line)
        for line in run("quantize", source, out, "--type", "q4_0", "--json").stdout.splitlines()
    ]
    assert steps[-1] == {"written": str(out), "bytes": out.stat().st_size}
    assert out.stat().st_size < source.stat().st_size / 3
    assert said("show", out)["quantization"] == "Q4_0"
    again = run("quantize", out, tmp_path / "again.gguf", "--type", "q8_0", status=1)
    assert "--allow-requantize`" in again.stderr.splitlines()[-1]
    allowed = ["--type", "q8_0", "--allow-requantize"]
    run("quantize", out, tmp_path / "again.gguf", *allowed)
    assert "Q8_0" in types(tmp_path / "again.gguf")


def test_a_failed_conversion_is_one_line(tmp_path):
    for arguments in (
        ["convert", tmp_path / "nowhere", tmp_path / "out.gguf"],
        ["convert", tmp_path, tmp_path / "out.gguf"],
        ["quantize", tmp_path / "nowhere.gguf", tmp_path / "out.gguf", "--type", "q8_0"],
    ):
        result = run(*arguments, status=1)
        assert result.stdout == "" and len(result.stderr.splitlines()) == 1
        assert not (tmp_path / "out.gguf").exists()


def test_an_unknown_type_is_a_usage_error(tmp_path):
    for command in ("convert", "quantize"):
        result = run(command, tmp_path, tmp_path / "out.gguf", "--type", "q9_9", status=2)
        assert "q4_k_m" in result.stderr
