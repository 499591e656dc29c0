"""Which layers keep recurrent states, and impossible sizes of these states."""

from pathlib import Path
from typing import Any

import pytest
import torch

from model_zoo.gguf.metadata import Metadata
from model_zoo.gguf.reader import GGUFFile
from model_zoo.gguf.scope import TensorScope
from model_zoo.gguf.tensors import META
from model_zoo.layers.hybrid import read_sizes, recurrent_layers
from model_zoo.layers.state_sizes import StateSizes
from model_zoo.layers.text_sizes import MAX_HEAD_DIM, TextSizes
from runtime.errors import ModelFileError
from tests.tiny_models import write_tiny_llama

KEYS = {
    "block_count": 6,
    "embedding_length": 64,
    "context_length": 512,
    "attention.head_count": 4,
    "attention.head_count_kv": 2,
    "attention.layer_norm_rms_epsilon": 1e-6,
    "ssm.time_step_rank": 6,
    "ssm.group_count": 2,
    "ssm.inner_size": 96,
    "ssm.state_size": 8,
    "ssm.conv_kernel": 4,
}


def metadata(**changes: Any) -> Metadata:
    keys = {name.replace("__", "."): value for name, value in changes.items()}
    values = {f"qwen35.{name}": value for name, value in (KEYS | keys).items()}
    return Metadata({"general.architecture": "qwen35", **values}, path=Path("a.gguf"))


@pytest.fixture(scope="module")
def scope(tmp_path_factory) -> TensorScope:
    path = tmp_path_factory.mktemp("models") / "tiny.gguf"
    write_tiny_llama(path)
    return TensorScope(GGUFFile.open(path), device=META, dtype=torch.float32)


@pytest.mark.parametrize(
    ("changes", "attending"),
    [
        ({}, [3]),
        ({"full_attention_interval": 2}, [1, 3, 5]),
        ({"full_attention_interval": 1}, [0, 1, 2, 3, 4, 5]),
        ({"attention.head_count_kv": [0, 2, 2, 0, 0, 2]}, [1, 2, 5]),
        ({"attention.recurrent_layers": [True, True, False, True, False, True]}, [2, 4]),
        ({"nextn_predict_layers": 3, "full_attention_interval": 3}, [2]),
    ],
)
def test_layers_attend_as_the_file_says(scope, changes, attending) -> None:
    told = metadata(**{name.replace(".", "__"): value for name, value in changes.items()})
    sizes = read_sizes(scope, told)
    recurrent = recurrent_layers(sizes, full_every=4)
    assert len(recurrent) == sizes.layers
    assert [layer for layer, recurs in enumerate(recurrent) if not recurs] == attending
    assert set(sizes.kv_heads) == {2}


@pytest.mark.parametrize(
    "changes",
    [
        {"attention__head_count_kv": [0] * 6},
        {"attention__head_count_kv": [2, 0, -2, 0, 0, 0]},
        {"attention__head_count_kv": [2, 0]},
        {"attention__head_count_kv": [3, 0, 0, 0, 0, 0]},
        {"attention__recurrent_layers": [True]},
        {"nextn_predict_layers": 6},
        {"nextn_predict_layers": -1},
        {"full_attention_interval": 0},
    ],
)
def test_layers_that_contradict_each_other_are_refused(scope, changes) -> None:
    (key,) = changes
    with pytest.raises(ModelFileError, match=key.replace("__", ".")):
        recurrent_layers(read_sizes(scope, metadata(**changes)))


@pytest.mark.parametrize(
    "changes",
    [
        {"ssm__group_count": 4},
        {"ssm__time_step_rank": 0},
        {"ssm__inner_size": 97},
        {"ssm__state_size": 1 << 20},
        {"ssm__conv_kernel": 1000},
    ],
)
def test_impossible_sizes_of_states_are_refused(changes) -> None:
    with pytest.raises(ModelFileError, match="ssm"):
        StateSizes.read(metadata(**changes))


def test_a_state_is_as_large_as_the_file_says() -> None:
    cache = StateSizes.read(metadata()).cache
    assert cache.page_shapes(16) == ((3, 2 * 2 * 8 + 96), (6, 8, 16))


def test_models_without_attention_may_be_wider_than_a_head() -> None:
    wide = metadata(embedding_length=2 * MAX_HEAD_DIM)
    assert TextSizes.read(wide, attends=False).hidden == 2 * MAX_HEAD_DIM
    with pytest.raises(ModelFileError, match="key_length"):
        TextSizes.read(metadata(embedding_length=8 * MAX_HEAD_DIM))
