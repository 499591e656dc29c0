"""Models compute the same bits whether their weights are in tiles or in rows of the file."""

from pathlib import Path

import pytest
import torch
from torch import Tensor

from model_zoo.gguf.tiled_copy import TilingOptions
from model_zoo.registry import LoadOptions, load
from runtime.kernels.native import has_integer_products
from runtime.quant.weight import Compute
from tests.families.agreement import random_tokens
from tests.families.paged_decoder import PagedDecoder
from tests.families.text_families import TEXT_MODELS
from tests.tiny_models import write_tiny

CPU = torch.device("cpu")
# A tied embedding, fused rows, experts, experts whose gates and ups alternate, latent attention,
# streams of projections, recurrent layers.
FAMILIES = ("gemma3", "phi3", "qwen3moe", "gpt-oss", "deepseek2", "gemma3n", "qwen3next")

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
def test_logits_have_the_same_bits_in_tiles(tmp_path, family: str) -> None:
    path, row = tmp_path / "tiny.gguf", TEXT_MODELS[family]
    write_tiny(path, row.wide_config(), type="q8_0", **row.options)
    tiling = TilingOptions(tmp_path / "tiles", least_bytes=1, spare_bytes=0)
    for compute in (Compute.FINE, Compute.FAST):
        rows = fed(path, compute, None)
        assert rows.isfinite().any()
        assert torch.equal(fed(path, compute, tiling), rows)
    assert len(list((tmp_path / "tiles").glob("*.tiles"))) == 1
