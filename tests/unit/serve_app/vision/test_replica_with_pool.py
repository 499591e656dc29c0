"""A tiny vision model with a pool of encoders answers as with a local encoder."""

import json
from collections.abc import AsyncIterator, Iterator
from contextlib import AsyncExitStack, asynccontextmanager
from functools import partial

import pytest
import torch

from model_zoo.chat.messages import ImagePart
from model_zoo.gguf.reader import GGUFFile
from model_zoo.multimodal.vision_loading import PREFIXES
from model_zoo.multimodal.vision_model import VisionModel
from model_zoo.registry import load
from runtime.errors import ConfigurationError, DoesNotFitError
from runtime.vision.encoder import batch_bytes
from serve_app.replica.loading import load_encoder, load_replica
from serve_app.replica.model_check import check_model
from serve_app.replica.replica import ModelReplica
from serve_app.vision.encoder_replica import EncoderReplica
from tests.tiny_models import write_tiny_llama
from tests.tiny_vision_model import ROWS, write_tiny_vision_model
from tests.unit.serve_app import loaded_replicas
from tests.unit.serve_app.loaded_replicas import loaded
from tests.unit.serve_app.replica.test_vision_replica import answer, likelihoods, png
from tests.unit.serve_app.vision.served_encoders import (
    CPU,
    ListedEncoders,
    encoded,
    pool_of,
    served,
)

WIDTH = 64  # of the tiny model
CONTEXT = 96


POOL = {"placement": "pool", "threads": 1}
settings = partial(loaded_replicas.settings, context_tokens=CONTEXT, vision=POOL)


@pytest.fixture(scope="module", params=["ollama", "llama.cpp"])
def files(request, tmp_path_factory):
    path = tmp_path_factory.mktemp("models") / "tiny.gguf"
    return path, write_tiny_vision_model(path, flavour=request.param)


@pytest.fixture(scope="module")
def local(files) -> Iterator[ModelReplica]:
    with loaded(*files, context_tokens=CONTEXT, vision={"placement": "local"}) as replica:
        yield replica


@pytest.fixture(scope="module")
def vision(files) -> VisionModel:
    path, projector = files
    model = load(path, projector=projector, device=CPU, dtype=torch.float32)
    assert model.vision is not None
    return model.vision


@asynccontextmanager
async def replicas_of(files, count: int) -> AsyncIterator[tuple[EncoderReplica, list]]:
    """`count` replicas that share one encoder."""
    async with AsyncExitStack() as opened:
        encoder = load_encoder(settings(*files))
        _, address = await opened.enter_async_context(served(encoder))
        replicas = []
        for _ in range(count):
            replicas.append(load_replica(settings(*files), ListedEncoders([address])))
            opened.callback(replicas[-1].close)
        yield encoder, replicas


async def test_answers_equal_those_of_a_local_encoder(files, local) -> None:
    async with replicas_of(files, 1) as (_, [replica]):
        for content in ((png(30, 40), "a b"), ("a ", png(40, 30, seed=1), "b"), ("a b",)):
            own = await answer(local, *content, max_tokens=12)
            pooled = await answer(replica, *content, max_tokens=12)
            assert pooled.tokens == own.tokens and pooled.usage.prompt_tokens > 0
            assert likelihoods(pooled) == pytest.approx(likelihoods(own), abs=0.02)


async def test_features_differ_from_local_ones_only_by_rounding(files, vision) -> None:
    (image,) = vision.prepare([ImagePart(png(30, 40))], at_most=CONTEXT).images
    own = vision.tower.encode(image.pixels[None], image.grid)[0]
    async with (
        served(load_encoder(settings(*files))) as (_, address),
        pool_of(ListedEncoders([address]), vision.tower, name=vision.name) as pool,
    ):
        found = await encoded(pool, image)
    assert own.dtype is found.dtype is torch.float32 and own.shape == (ROWS, WIDTH)
    assert torch.equal(found, own.to(torch.bfloat16).float())


async def test_replicas_and_turns_share_one_encoding(files) -> None:
    image = png(33, 44, seed=9)
    async with replicas_of(files, 2) as (encoder, replicas):
        for replica in replicas:
            await answer(replica, image, "hello")
            await answer(replica, image, "hello", image, "again")
        statistics = encoder.statistics()
        assert (statistics.images_encoded_total, statistics.images_known_total) == (1, 1)
        assert [replica.statistics().images_encoded_total for replica in replicas] == [1, 1]
        assert encoder.statistics().images_waiting == 0


@pytest.fixture
def fetched(monkeypatch) -> list[str]:
    """Names of the tensors whose data are read during loading."""
    names: list[str] = []
    fetch = GGUFFile.fetch

    def noted(file, name, *part, **options):
        names.append(name)
        return fetch(file, name, *part, **options)

    monkeypatch.setattr(GGUFFile, "fetch", noted)
    return names


def test_an_encoder_reads_only_the_tower_and_logs_its_progress(files, fetched, capsys) -> None:
    encoder = load_encoder(settings(*files))
    encoder.close()
    assert fetched and all(name.startswith(PREFIXES) for name in fetched)
    lines = [json.loads(line) for line in capsys.readouterr().err.splitlines()]
    progress = [line["percent"] for line in lines if line["event"] == "loading"]
    assert progress == sorted(progress) and progress[-1] == 100
    (logged,) = [line for line in lines if line["event"] == "vision encoder"]
    assert logged["weight_bytes"] == encoder.weight_bytes > 0 and logged["host_bytes"] > 0


def test_a_replica_with_a_pool_reads_no_tower_and_reserves_nothing_for_one(
    files, fetched, vision, local, capsys
) -> None:
    replica = load_replica(settings(*files), ListedEncoders())
    assert fetched and not any(name.startswith(PREFIXES) for name in fetched)
    spared = vision.weight_bytes + batch_bytes(vision.tower, 1)
    arriving = 2 * ROWS * WIDTH * 2
    card, own = replica.describe(), local.describe()
    replica.close()
    assert own.reserved_bytes - card.reserved_bytes == spared - arriving
    assert "vision" in card.capabilities
    lines = [json.loads(line) for line in capsys.readouterr().err.splitlines()]
    (logged,) = [line for line in lines if line["event"] == "vision"]
    assert (logged["placement"], logged["weight_bytes"]) == ("pool", 0)
    progress = [line["percent"] for line in lines if line["event"] == "loading"]
    assert progress[-1] == 100


def test_an_encoder_that_does_not_fit_names_what_it_needs(files) -> None:
    with pytest.raises(DoesNotFitError, match=r"encoder needs .* use 1,000\..*weights"):
        load_encoder(settings(*files, vision={"memory_bytes": 1000}))


def test_encoders_for_a_model_without_vision_are_refused(tmp_path) -> None:
    write_tiny_llama(tmp_path / "blind.gguf")
    for tried in (check_model, load_replica, load_encoder):
        with pytest.raises(ConfigurationError, match=r"Model demo: `vision` is given"):
            tried(settings(tmp_path / "blind.gguf"))


def test_a_cache_too_small_for_an_image_is_refused_before_the_start(files) -> None:
    with pytest.raises(ConfigurationError, match=r"`vision.cache_bytes` is 9; .* 1,152"):
        check_model(settings(*files, vision={"cache_bytes": 9}))
