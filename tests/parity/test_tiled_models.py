"""Models compute the same bits with tiles as with rows of the file; F16 and BF16 are rounded."""

from pathlib import Path

import pytest
import torch
from torch import Tensor

from model_zoo.gguf.tiled_copy import TilingOptions
from model_zoo.registry import LoadOptions, load
from runtime.kernels.matmul import tiled_type
from runtime.kernels.native import has_integer_products
from runtime.quant.block_types import BlockType, block_type
from runtime.quant.weight import Compute
from tests.families.agreement import random_tokens
from tests.families.paged_decoder import PagedDecoder
from tests.families.text_families import TEXT_MODELS
from tests.tiny_models import write_tiny

CPU = torch.device("cpu")
# A tied embedding, fused rows, experts, experts whose gates and ups alternate, latent attention,
# streams of projections, recurrent layers.
FAMILIES = ("gemma3", "phi3", "qwen3moe", "gpt-oss", "deepseek2", "gemma3n", "qwen3next")

# In nats; 5e-4 to 1e-3 was measured, and 8e-3 with activations of 8 bits. Median, because a token
# may get other experts.
MEDIAN_DIFFERENCE = 2e-3

pytestmark = pytest.mark.skipif(
    not has_integer_products(), reason="weights are rearranged for integer products only"
)


def fed(path: Path, compute: Compute, tiling: TilingOptions | None) -> Tensor:
    """Logits of a prompt, of two tokens and of one."""
    options = LoadOptions(compute=compute, tiling=tiling)
    paged = PagedDecoder(load(path, device=CPU, dtype=torch.float32, options=options).decoder)
    tokens = random_tokens(41, seed=1)
    return torch.cat([paged.feed({0: part}) for part in (tokens[:38], tokens[38:40], tokens[40:])])


@pytest.mark.parametrize("family", FAMILIES)
def test_logits_have_the_same_bits_in_tiles(tmp_path, monkeypatch, family: str) -> None:
    def quantised(type: BlockType, compute: Compute) -> BlockType | None:
        return None if type.block_elements == 1 else tiled_type(type, compute)

    monkeypatch.setattr("model_zoo.gguf.tensors.tiled_type", quantised)
    path, row = tmp_path / "tiny.gguf", TEXT_MODELS[family]
    write_tiny(path, row.wide_config(), type="q8_0", **row.options)
    tiling = TilingOptions(tmp_path / "tiles", least_bytes=1, spare_bytes=0)
    for compute in (Compute.FINE, Compute.FAST):
        rows = fed(path, compute, None)
        assert rows.isfinite().any()
        assert torch.equal(fed(path, compute, tiling), rows)
    assert len(list((tmp_path / "tiles").glob("*.tiles"))) == 1


@pytest.mark.parametrize(
    ("family", "type"),
    [("gemma3", "f16"), ("gpt-oss", "f16"), ("deepseek2", "f16"), ("phi3", "bf16")],
)
def test_plain_numbers_in_tiles_change_log_probabilities_little(
    tmp_path, family: str, type: str
) -> None:
    if tiled_type(block_type(type.upper()), Compute.FINE) is None:
        pytest.skip(f"this processor multiplies rows of {type.upper()}")
    path, row = tmp_path / "tiny.gguf", TEXT_MODELS[family]
    write_tiny(path, row.wide_config(), type=type, **row.options)
    tiling = TilingOptions(tmp_path / "tiles", least_bytes=1, spare_bytes=0)
    rows = fed(path, Compute.EXACT, None)
    tiles = fed(path, Compute.FINE, tiling)
    assert not torch.equal(tiles, rows)
    differences = (tiles.log_softmax(-1) - rows.log_softmax(-1)).abs()
    assert differences.median() < MEDIAN_DIFFERENCE
