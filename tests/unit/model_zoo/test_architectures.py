"""What an architecture needs of a file and does not find there is named."""

from pathlib import Path

import numpy as np
import pytest
import torch

from model_zoo.gguf.metadata import Metadata
from model_zoo.gguf.reader import GGUFFile
from model_zoo.gguf.scope import META, TensorScope
from model_zoo.registry import class_for
from runtime.errors import ModelFileError
from tests.gguf_files import rewrite
from tests.parity import test_gemma2, test_gemma3, test_llama, test_qwen2, test_qwen3
from tests.tiny_models import write_tiny

CONFIGS = {
    "gemma2": test_gemma2.CONFIGS["plain"],
    "gemma3": test_gemma3.CONFIGS["plain"],
    "llama": test_llama.RELATIVES["nemo"],
    "qwen2": test_qwen2.CONFIGS["plain"],
    "qwen3": test_qwen3.CONFIGS["heads_wider_than_hidden"],
}
SIZES = (
    "block_count", "embedding_length", "context_length", "feed_forward_length",
    "attention.head_count",
)  # fmt: skip
EPSILON, WINDOW = "attention.layer_norm_rms_epsilon", "attention.sliding_window"
NEEDED_KEYS = {
    "gemma2": (*SIZES, EPSILON),
    "gemma3": (*SIZES, WINDOW),
    "llama": (*SIZES, EPSILON),
    "qwen2": (*SIZES, EPSILON),
    "qwen3": (*SIZES, EPSILON),
}
TENSORS = (
    "token_embd", "output_norm", "blk.1.attn_norm", "blk.1.attn_q", "blk.0.attn_k", "blk.1.attn_v",
    "blk.0.attn_output", "blk.1.ffn_norm", "blk.0.ffn_gate", "blk.1.ffn_up", "blk.1.ffn_down",
)  # fmt: skip
POST_NORMS = ("blk.1.post_attention_norm", "blk.0.post_ffw_norm")
HEAD_NORMS = ("blk.0.attn_q_norm", "blk.1.attn_k_norm")
NEEDED_TENSORS = {
    "gemma2": (*TENSORS, *POST_NORMS),
    "gemma3": (*TENSORS, *POST_NORMS, *HEAD_NORMS),
    "llama": TENSORS,
    "qwen2": TENSORS,
    "qwen3": (*TENSORS, *HEAD_NORMS),
}
every_architecture = pytest.mark.parametrize("architecture", CONFIGS)


@pytest.fixture(scope="module")
def files(tmp_path_factory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("models")
    for architecture, config in CONFIGS.items():
        write_tiny(folder / f"{architecture}.gguf", config)
    return {architecture: folder / f"{architecture}.gguf" for architecture in CONFIGS}


def build(path: Path) -> None:
    """The decoder without data, as loading begins."""
    file = GGUFFile.open(path)
    metadata = Metadata(file.metadata, path=path)
    scope = TensorScope(file, device=META, dtype=torch.float32)
    class_for(metadata)(scope, metadata)
    scope.check()


def refusal(files, architecture: str, **changes) -> str:
    source = files[architecture]
    keys = {"general.architecture": architecture} | changes.pop("keys", {})
    broken = rewrite(source, source.with_name("broken.gguf"), keys=keys, **changes)
    with pytest.raises(ModelFileError) as caught:
        build(broken)
    return str(caught.value)


@pytest.mark.parametrize(
    "architecture, key", [(name, key) for name, keys in NEEDED_KEYS.items() for key in keys]
)
def test_a_needed_key_that_is_missing_is_named(files, architecture, key) -> None:
    build(files[architecture])
    message = refusal(files, architecture, keys={f"{architecture}.{key}": None})
    assert f"`{architecture}.{key}` is missing" in message


@every_architecture
def test_needed_tensors_that_are_missing_are_named_at_once(files, architecture) -> None:
    names = [f"{name}.weight" for name in NEEDED_TENSORS[architecture]]
    if architecture in ("llama", "qwen2", "qwen3"):
        names.append("output.weight")  # else the embedding would have to stand in, and is gone
    message = refusal(files, architecture, tensors=dict.fromkeys(names))
    assert all(name in message for name in names if name != "output.weight"), message


@every_architecture
@pytest.mark.parametrize("name", ["blk.0.attn_k.weight", "blk.1.ffn_down.weight"])
def test_a_tensor_that_contradicts_the_sizes_is_named(files, architecture, name) -> None:
    wrong = np.zeros((3, 5), dtype=np.float32)
    message = refusal(files, architecture, tensors={name: wrong})
    assert f"{name} is 3 x 5, not " in message


@every_architecture
def test_a_tensor_that_no_layer_knows_is_named(files, architecture) -> None:
    message = refusal(files, architecture, tensors={"blk.0.attn_magic.weight": np.ones(3, "f4")})
    assert "not known to this architecture (blk.0.attn_magic.weight)" in message
