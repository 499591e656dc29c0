"""What a process imports that loads models, or builds them from headers only, as every start does
first."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
from transformers import Phi3Config, Qwen2Config

from tests.families.text_families import TEXT_MODELS
from tests.tiny_models import write_tiny, write_tiny_llama

# Arithmetic on tensors without data makes torch load its compiler: a second, and 70 MB.
PROGRAM = """
import importlib, json, sys
import torch
from model_zoo.families import TEXT_FAMILIES, VISION_FAMILIES
from model_zoo.gguf.tensors import META
from model_zoo.registry import load

def imported(prefix):
    return [name for name in sys.modules if name.startswith(prefix)]

before, compiling = imported("model_zoo.models."), []
for path in sys.argv[1:]:
    load(path, device=META, dtype=torch.float32)
    compiling += [path] if "torch._dynamo" in sys.modules else []
for family in TEXT_FAMILIES.values():
    assert callable(importlib.import_module(family.text).build_decoder)
for family in VISION_FAMILIES.values():
    assert callable(importlib.import_module(family.multimodal).build_multimodal)
print(json.dumps([before, compiling, imported("model_zoo.convert")]))
"""
# Families whose layers compute tensors from those of the file.
COMPUTING = ("gemma3n", "gemma4", "hunyuan-dense", "kimi-linear", "mllama", "rwkv7")
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


@pytest.fixture(scope="module")
def reported(tmp_path_factory) -> list[list[str]]:
    """What one process reports, since importing torch takes seconds."""
    folder, paths = tmp_path_factory.mktemp("models"), []
    for write in (with_rope_factors, with_biases, with_long_factors):
        paths.append(folder / f"{write.__name__}.gguf")
        write(paths[-1])
    for family in COMPUTING:
        paths.append(folder / f"{family}.gguf")
        TEXT_MODELS[family].write(paths[-1], TEXT_MODELS[family].divided or "plain")
    done = subprocess.run([sys.executable, "-c", PROGRAM, *paths], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def test_every_family_can_be_imported_none_is_beforehand_and_none_imports_conversion(reported):
    before, _, conversion = reported
    assert (before, conversion) == ([], [])


def test_outlines_do_without_torchs_compiler(reported):
    _, compiling, _ = reported
    assert compiling == []
