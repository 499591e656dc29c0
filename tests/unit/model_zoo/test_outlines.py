"""Models built of headers alone, as every start does first: nothing is computed for them."""

import subprocess
import sys
from pathlib import Path

import pytest
from transformers import Phi3Config, Qwen2Config

from tests.tiny_models import write_tiny, write_tiny_llama

# Arithmetic on tensors without data makes torch load its compiler: a second, and 70 MB.
OUTLINE = """
import sys
import torch
from model_zoo.gguf.tensors import META
from model_zoo.registry import load
load(sys.argv[1], device=META, dtype=torch.float32)
print("torch._dynamo" in sys.modules)
"""
SIZES = {
    "hidden_size": 64,
    "num_hidden_layers": 1,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "intermediate_size": 96,
    "max_position_embeddings": 512,
}


def with_rope_factors(path: Path) -> None:
    write_tiny_llama(path, config="llama3_rope", type="Q8_0")


def with_biases(path: Path) -> None:
    write_tiny(path, Qwen2Config(**SIZES))


def with_long_factors(path: Path) -> None:
    factors = {"short_factor": [1.0 + i for i in range(8)], "long_factor": [2.0] * 8}
    rope = {"rope_type": "longrope", "rope_theta": 10000.0, **factors}
    rope["original_max_position_embeddings"] = 256
    config = Phi3Config(**SIZES, rope_parameters=rope, original_max_position_embeddings=256)
    write_tiny(path, config)


@pytest.mark.parametrize("write", [with_rope_factors, with_biases, with_long_factors])
def test_an_outline_does_without_torchs_compiler(tmp_path, write) -> None:
    write(tmp_path / "tiny.gguf")
    done = subprocess.run(
        [sys.executable, "-c", OUTLINE, str(tmp_path / "tiny.gguf")],
        capture_output=True,
        text=True,
    )
    assert done.stdout.split() == ["False"], done.stderr
