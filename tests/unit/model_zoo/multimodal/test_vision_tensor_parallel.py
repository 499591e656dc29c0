"""Vision models are not divided by ranks or layer placement."""

import pytest
import torch

from model_zoo.registry import LoadOptions, load
from runtime.distributed.ranks import Unconnected
from tests.tiny_vision_model import write_tiny_vision_model

CPU = torch.device("cpu")


@pytest.mark.parametrize("flavour", ["ollama", "llama.cpp"])
def test_the_first_rank_encodes_images_without_the_others(tmp_path, flavour) -> None:
    path = tmp_path / "tiny.gguf"
    projector = write_tiny_vision_model(path, flavour=flavour)
    known = {"projector": projector, "device": CPU, "dtype": torch.float32}
    towers = [
        load(path, **known).tower,
        load(path, **known, options=LoadOptions(ranks=Unconnected(2))).tower,
    ]
    largest = towers[0].limits.largest
    pixels = torch.rand(1, *largest.shape)
    with torch.inference_mode():
        whole, divided = (tower.encode(pixels, largest.grid) for tower in towers)
    assert torch.equal(whole, divided) and whole.any()
