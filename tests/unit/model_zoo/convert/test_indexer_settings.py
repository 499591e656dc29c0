"""Settings of models whose layers have indexers, or share those of layers before them."""

from typing import Any

import pytest

from runtime.errors import ModelFileError
from tests.unit.model_zoo.convert.published_settings import GLM_47_FLASH
from tests.unit.model_zoo.convert.test_conversion_settings import today, told

INDEXER = {"index_head_dim": 128, "index_n_heads": 32, "index_topk": 2048}
GLM_5 = (
    GLM_47_FLASH
    | INDEXER
    | {
        "architectures": ["GlmMoeDsaForCausalLM"],
        "model_type": "glm_moe_dsa",
        "first_k_dense_replace": 3,
        "num_hidden_layers": 78,
        "rope_parameters": {"rope_theta": 1000000, "rope_type": "default"},
    }
)
DEEPSEEK_V32 = (
    GLM_47_FLASH
    | INDEXER
    | {
        "architectures": ["DeepseekV32ForCausalLM"],
        "model_type": "deepseek_v32",
        "first_k_dense_replace": 3,
        "n_group": 8,
        "num_hidden_layers": 61,
        "rope_scaling": {
            "beta_fast": 32,
            "beta_slow": 1,
            "factor": 40,
            "mscale": 1.0,
            "mscale_all_dim": 1.0,
            "original_max_position_embeddings": 4096,
            "type": "yarn",
        },
        "rope_theta": 10000,
        "topk_group": 4,
    }
)


@pytest.mark.parametrize("published", [GLM_5, DEEPSEEK_V32], ids=["GLM-5", "DeepSeek V3.2"])
def test_published_settings_are_read_as_transformers_reads_them(published, tmp_path) -> None:
    keys = told(tmp_path / "published", published)
    expanded = today(published).to_dict() | {"architectures": published["architectures"]}
    assert keys == told(tmp_path / "today", expanded)
    assert keys["leading_dense_block_count"] == 3
    assert keys["attention.indexer.top_k"] == 2048


@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"indexer_types": ["full", "shared", "full"]},
        {"index_topk_pattern": "FSF"},
        {"index_topk_freq": 2},
        {"index_topk_freq": 2, "index_skip_topk_offset": 1},
    ],
)
def test_layers_with_indexers_are_those_of_transformers(settings: dict[str, Any], tmp_path) -> None:
    values = GLM_5 | {"num_hidden_layers": 3} | settings
    expected = [kind == "full" for kind in today(values).indexer_types]
    assert told(tmp_path / "folder", values)["attention.indexer.types"] == expected


def test_indexers_of_another_number_of_layers_are_refused(tmp_path) -> None:
    with pytest.raises(ModelFileError, match="has 78 layers, and the indexers of 2"):
        told(tmp_path / "folder", GLM_5 | {"indexer_types": ["full", "shared"]})
