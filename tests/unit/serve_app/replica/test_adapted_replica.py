"""A configured model with LoRA adapters: files, memory, identity, and as a base of others."""

import asyncio
import os
from dataclasses import replace
from pathlib import Path

import pytest

from model_zoo.gguf.adapter_path import MAX_ADAPTERS
from model_zoo.sources.reference import PathSource
from model_zoo.store.definition import ChosenAdapter
from runtime.engine.request import SamplingParams
from runtime.errors import ConfigurationError, EngineDeadError, ModelFileError
from serve_app.config.settings import ModelSettings, read_settings
from serve_app.messages.tasks import ChatTask, RawText
from serve_app.on_demand.definitions import base_from_settings
from serve_app.replica.loading import load_replica
from serve_app.replica.model_check import check_model
from serve_app.replica.model_files import local_files
from tests.adapter_files import random_pairs, write_adapter
from tests.tiny_models import write_tiny_llama
from tests.unit.serve_app import loaded_replicas
from tests.unit.serve_app.answers import answer_of

SHAPES = {"blk.0.ffn_down.weight": (64, 96), "blk.1.attn_q.weight": (64, 64)}


@pytest.fixture
def files(tmp_path) -> tuple[Path, Path]:
    write_tiny_llama(tmp_path / "tiny.gguf", type="Q8_0")
    pairs = random_pairs(SHAPES, 4)
    return tmp_path / "tiny.gguf", write_adapter(tmp_path / "a.gguf", pairs, alpha=8.0)


def settings(files: tuple[Path, Path], *scales: float, **change) -> ModelSettings:
    adapters = [{"source": str(files[1]), "scale": scale} for scale in scales]
    return loaded_replicas.settings(files[0], **{"adapters": adapters, **change})


def answer(replica, **change) -> str:
    task = ChatTask("t", "demo", RawText("a b c"), SamplingParams(seed=1), max_tokens=12)
    return asyncio.run(answer_of(replica, replace(task, **change))).text


def test_the_scale_multiplies_the_changes(files) -> None:
    answers, identities, weights = [], set(), []
    for scales in ((), (1.0,), (0.5, 0.5)):
        replica = load_replica(settings(files, *scales))
        answers.append(answer(replica))
        identities.add(replica.identity)
        weights.append(replica._model.description.weight_bytes)
        replica.close()
    plain, on, halves = answers
    assert plain != on == halves
    assert len(identities) == 3, "no replica continues the answers of another model"
    assert weights[1] - weights[0] == 4 * 4 * (64 + 96 + 64 + 64)
    assert weights[2] - weights[0] == 2 * (weights[1] - weights[0])


def test_the_adapter_is_checked_before_the_application_starts(files) -> None:
    assert check_model(settings(files, 1.0)) is None
    files[1].write_bytes(files[1].read_bytes()[:-2000])
    with pytest.raises(ModelFileError, match=r"Model demo: .*a\.gguf"):
        check_model(settings(files, 1.0))


def test_an_adapter_written_in_place_fails_the_replica(files) -> None:
    replica = load_replica(settings(files, 1.0))
    replica.check()
    os.utime(files[1], (0, 0))
    with pytest.raises(EngineDeadError, match=r"a.gguf was written in place"):
        replica.check()
    replica.close()


@pytest.mark.parametrize(
    ("adapters", "reported"),
    [
        ([{"source": "ollama://x"}], "adapters[0].source"),
        ([{"source": "hf://org/repo"}], "path of a file"),
        ([{"source": "a.gguf", "scale": float("nan")}], "adapters[0].scale"),
        ([{"source": "a.gguf", "scales": 1}], "did you mean scale?"),
        ([{"source": "a.gguf"}] * (MAX_ADAPTERS + 1), "args.models[0].adapters"),
    ],
)
def test_wrong_settings_are_refused_by_key(adapters, reported) -> None:
    model = {"name": "demo", "source": "tiny.gguf", "adapters": adapters}
    with pytest.raises(ConfigurationError) as caught:
        read_settings({"models": [model]})
    assert reported in str(caught.value)


def test_settings_replace_the_adapters_of_a_model(files, tmp_path) -> None:
    found = local_files(settings(files, 0.5), {})
    assert found is not None and [each.scale for each in found.adapters] == [0.5]
    unset = local_files(settings(files, adapters=None), {})
    assert unset == replace(found, adapters=())


def test_a_model_created_from_a_configured_one_has_its_adapters(files) -> None:
    (adapter,) = base_from_settings(settings(files, 0.5)).adapters or ()
    assert adapter == ChosenAdapter(PathSource(files[1]), 0.5)
    assert base_from_settings(settings(files, adapters=None)).adapters is None
