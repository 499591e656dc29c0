"""Models built from headers only, as at the beginning of every start, without computing
anything."""

import subprocess
import sys
from pathlib import Path

from transformers import Phi3Config, Qwen2Config

from tests.tiny_models import write_tiny, write_tiny_llama

# Arithmetic on tensors without data makes torch load its compiler: a second, and 70 MB.
OUTLINE = """
import sys
import torch
from model_zoo.gguf.tensors import META
from model_zoo.registry import load
for path in sys.argv[1:]:
    load(path, device=META, dtype=torch.float32)
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


def test_outlines_do_without_torchs_compiler(tmp_path) -> None:
    """In one process, which takes seconds to import torch."""
    paths = []
    for write in (with_rope_factors, with_biases, with_long_factors):
        paths.append(tmp_path / f"{write.__name__}.gguf")
        write(paths[-1])
    done = subprocess.run([sys.executable, "-c", OUTLINE, *paths], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    loads_compiler = zip([path.stem for path in paths], done.stdout.split(), strict=True)
    assert [name for name, loads in loads_compiler if loads == "True"] == []
