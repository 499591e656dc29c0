"""Towers that compute in bfloat16: near their own features in float32, within their limits."""

from types import ModuleType

import pytest
import torch

from tests.parity import (
    test_towers_gemma3,
    test_towers_gemma4,
    test_towers_idefics3,
    test_towers_internvl,
    test_towers_llama4,
    test_towers_llava,
    test_towers_llava_next,
    test_towers_mistral3,
    test_towers_mllama,
    test_towers_qwen3vl,
    test_towers_qwen25vl,
)
from tests.parity.towers import check_limits, encoded, load_tower, make_eyes, random_pixels, worst

# Of a row's largest feature: numbers have eight bits.
NEAR = 0.1
FAMILIES: dict[str, tuple[ModuleType, str]] = {
    "gemma3": (test_towers_gemma3, "ollama"),
    "gemma4": (test_towers_gemma4, "ollama"),
    "idefics3": (test_towers_idefics3, "llama.cpp"),
    "internvl": (test_towers_internvl, "llama.cpp"),
    "llama4": (test_towers_llama4, "ollama"),
    "llava": (test_towers_llava, "llama.cpp"),
    "llava_next": (test_towers_llava_next, "llama.cpp"),
    "mistral3": (test_towers_mistral3, "llama.cpp"),
    "mllama": (test_towers_mllama, "ollama"),
    "qwen25vl": (test_towers_qwen25vl, "ollama"),
    "qwen3vl": (test_towers_qwen3vl, "llama.cpp"),
}


@pytest.mark.parametrize("family", FAMILIES)
def test_features_in_bfloat16_are_near(tmp_path, family) -> None:
    module, flavour = FAMILIES[family]
    config = module.CONFIGS["smolvlm"] if family == "idefics3" else module.config()
    build = module.build_tower
    vision = make_eyes(build, config, tmp_path, flavour=flavour)
    half = load_tower(build, vision.path, torch.bfloat16)
    image = half.largest()
    pixels = random_pixels(1, *image.pixels.shape)
    features = encoded(half, pixels, image.grid)
    assert features.dtype == torch.bfloat16
    assert worst(features, encoded(vision.tower, pixels, image.grid)) <= NEAR
    check_limits(half, images=2)
