"""Factors of products of matrices in NVFP4: llama.cpp computes what we compute with its files."""

from pathlib import Path

import numpy as np
import pytest
import torch

from tests.families.agreement import load_decoder
from tests.families.paged_decoder import PagedDecoder
from tests.families.text_families import TEXT_MODELS
from tests.families.text_family import changed
from tests.gguf_files import matrices, rewrite
from tests.peers.llama_cpp_library import their_blocks, their_log_probabilities
from tests.tiny_models import write_tiny

TOKENS = [int(token) for token in np.random.default_rng(0).integers(0, 300, 40)]
# Of the median: llama.cpp rounds the inputs of a product to 8 bits; 0.02 and 0.03 were measured.
NEAR_NATS = 0.05
LARGEST = 6 * 448  # number of a block, times the scale of 16 of them
# `llama_model_base::load_tensors` reads the factors of these, of each expert and of the head.
SCALED = "attn_q attn_k attn_v attn_output ffn_gate ffn_up ffn_down output".split()
SCALED += [f"ffn_{name}_exps" for name in ("gate", "up", "down")]
OTHERS = [f"blk.0.{name}.scale" for name in ("attn_v", "ffn_up", "ffn_up_exps")]


def in_nvfp4(path: Path) -> Path:
    """As `convert_hf_to_gguf.py` writes checkpoints of ModelOpt: the factor is the largest number
    of a matrix, divided by that of a block."""
    tensors = {}
    for name, weights in matrices(path).items():
        stem = name.removesuffix("weight")
        if stem.rstrip(".").rpartition(".")[2] in SCALED:
            flat = torch.from_numpy(weights.reshape(-1, *weights.shape[-2:]).copy())
            factors = flat.abs().amax(dim=(1, 2)) / LARGEST
            blocks = [their_blocks(each, "NVFP4") for each in flat / factors[:, None, None]]
            data = torch.stack(blocks).view(*weights.shape[:-1], -1).numpy()
            tensors[name] = data, "NVFP4"
            tensors[f"{stem}scale"] = factors.numpy()
            tensors[f"{stem}input_scale"] = np.full(len(factors), 0.01, np.float32)
    return rewrite(path, path.with_name("nvfp4.gguf"), tensors=tensors)


@pytest.mark.parametrize("family", ["llama", "qwen3moe"])
def test_llama_cpp_computes_what_we_compute(tmp_path, family: str) -> None:
    write_tiny(tmp_path / "tiny.gguf", TEXT_MODELS[family].wide_config())
    path = in_nvfp4(tmp_path / "tiny.gguf")
    theirs = their_log_probabilities(path, TOKENS)

    def difference(file: Path) -> float:
        ours = PagedDecoder(load_decoder(file)).feed({0: TOKENS}).log_softmax(-1)
        known = ours.isfinite()
        return (ours[known] - theirs[:, : ours.shape[1]][known]).abs().median().item()

    assert difference(path) < NEAR_NATS
    factors = {name: 2 * numbers for name, numbers in matrices(path).items() if name in OTHERS}
    assert factors and difference(changed(path, tensors=factors)) > 2 * NEAR_NATS
