"""Logits of Qwen2.5-VL's text model against `transformers`, on tiny random models."""

import pytest
from transformers import Qwen2_5_VLConfig
from transformers.models.qwen2_5_vl.configuration_qwen2_5_vl import (
    Qwen2_5_VLTextConfig,
    Qwen2_5_VLVisionConfig,
)

from runtime.errors import ModelFileError
from tests.gguf_files import rewrite
from tests.parity.agreement import (
    CHECKS,
    QUANTIZED_TYPES,
    Pair,
    check_quantized,
    load_decoder,
    make_pair,
)

SIZES = {
    "hidden_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "intermediate_size": 96,
    "max_position_embeddings": 512,
}
VISION = Qwen2_5_VLVisionConfig(
    depth=2, hidden_size=32, intermediate_size=48, num_heads=2, out_hidden_size=64,
    fullatt_block_indexes=[1],
)  # fmt: skip


def config(theta: float = 1e6, sections: tuple[int, ...] = (2, 3, 3), **changes):
    rope = {"rope_type": "default", "rope_theta": theta, "mrope_section": list(sections)}
    text = Qwen2_5_VLTextConfig(**(SIZES | changes), rope_parameters=rope)
    vision = Qwen2_5_VLVisionConfig(**(VISION.to_dict() | {"out_hidden_size": text.hidden_size}))
    tied = changes.get("tie_word_embeddings", False)
    return Qwen2_5_VLConfig(text_config=text, vision_config=vision, tie_word_embeddings=tied)


CONFIGS = {"plain": config(), "tied": config(tie_word_embeddings=True), "base": config(theta=1e4)}
LARGE = config(hidden_size=256, intermediate_size=256, sections=(8, 12, 12))


@pytest.fixture(scope="module", params=CONFIGS)
def pair(request, tmp_path_factory) -> Pair:
    return make_pair(CONFIGS[request.param], tmp_path_factory.mktemp("models") / "tiny.gguf")


@pytest.mark.parametrize("check", CHECKS)
def test_logits_agree(pair, check) -> None:
    CHECKS[check](pair)


@pytest.mark.parametrize("type", QUANTIZED_TYPES)
def test_quantized_copies_agree(tmp_path, type) -> None:
    check_quantized(LARGE, tmp_path, type)


@pytest.mark.parametrize("sections", [[2, 3], [2, 3, 4], [2, 3, 3, 1], [-2, 5, 5, 0], []])
def test_sections_that_are_not_all_frequencies_are_refused(tmp_path, sections) -> None:
    make_pair(config(), tmp_path / "tiny.gguf")
    keys = {
        "general.architecture": "qwen2vl",
        "qwen2vl.rope.dimension_sections": sections or [0],
    }
    path = rewrite(tmp_path / "tiny.gguf", tmp_path / "odd.gguf", keys=keys)
    with pytest.raises(ModelFileError, match="dimension_sections"):
        load_decoder(path)
