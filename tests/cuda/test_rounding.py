"""Whole models whose norms round the activations of the products that follow."""

from collections import Counter
from pathlib import Path

import pytest
import torch
from torch import Tensor

from model_zoo.gguf.adapter_path import AdapterPath
from model_zoo.gguf.metadata import Metadata
from model_zoo.gguf.reader import GGUFFile
from model_zoo.layers import norm
from model_zoo.registry import open_adapters
from runtime.kernels.pointwise import add_norm_, rms_norm
from runtime.kernels.triton import launch
from runtime.quant.weight import Compute
from runtime.worker.model import DecoderModel
from tests.adapter_files import random_pairs, write_adapter
from tests.cuda.interpreted import as_on_a_device
from tests.families.agreement import load_decoder
from tests.families.paged_decoder import PagedDecoder
from tests.tiny_models import TinyLlama, write_tiny_llama

# The interpreter is slow with vectors.
SIZES = TinyLlama(hidden=32, layers=1, heads=2, kv_heads=1, feed_forward=32)


def norm_alone(x, y, weight, bias, eps, *, scale, rounding) -> Tensor:
    """`rounded_norm_`, whose result is left to the products to round."""
    assert rounding is Compute.FINE and bias is None
    return rms_norm(x, weight, eps) if y is None else add_norm_(x, y, weight, None, eps)


def test_norms_round_for_products_to_the_same_bits(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With an adapter, whose products take the same rows."""
    path = tmp_path / "tiny.gguf"
    write_tiny_llama(path, config=SIZES, type="Q8_0")
    outs = {"attn_q": SIZES.heads * SIZES.head_dim, "ffn_up": SIZES.feed_forward}
    shapes = {f"blk.0.{name}.weight": (out, SIZES.hidden) for name, out in outs.items()}
    adapter = AdapterPath(write_adapter(tmp_path / "adapter.gguf", random_pairs(shapes, 4)))
    counts, start = Counter[str](), launch.start

    def counted(kernel, *arguments) -> None:
        counts[kernel.fn.__name__] += 1
        start(kernel, *arguments)

    with as_on_a_device():
        model = loaded(path, adapter)
        monkeypatch.setattr(model, "logits", lambda states: states)
        monkeypatch.setattr(launch, "start", counted)
        by_norms, of_norms = PagedDecoder(model, slots=1).feed({0: [5, 9]}), counts.copy()
        counts.clear()
        monkeypatch.setattr(norm, "rounded_norm_", norm_alone)
        by_products = PagedDecoder(model, slots=1).feed({0: [5, 9]})
    assert torch.equal(by_norms, by_products)
    assert (of_norms["round_kernel"], counts["round_kernel"]) == (2, 4)


def loaded(path: Path, adapter: AdapterPath) -> DecoderModel:
    metadata = Metadata(GGUFFile.open(path).metadata, path=path)
    adapters = open_adapters((adapter,), metadata)
    return load_decoder(path, compute=Compute.FINE, adapters=adapters)
