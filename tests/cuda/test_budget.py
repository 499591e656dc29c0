"""What a step of an 8B model launches and moves on a CUDA device, without one."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.cuda.fake_device import fake_cuda
from tests.cuda.large_model import EMBEDDING_BYTES, VOCABULARY, write_large_model
from tests.cuda.steps import FakeSteps, Rows, load_on_device

CONTEXT = 1024


@dataclass(frozen=True)
class Budget:
    """The most of each.

    times: bytes that move, as a multiple of weights and visible cache together. uploads, downloads:
    copies between host and device; pageable: uploads of memory that is not pinned.
    """

    launches: int
    times: float
    uploads: int = 1
    downloads: int = 1
    pageable: int = 0


@dataclass(frozen=True)
class Scene:
    """A step of a model with so many of its 32 layers. `goal`: what kernels are to reach; `holds`:
    what they have reached, to be lowered with every kernel."""

    step: Sequence[Rows]
    layers: int
    goal: Budget
    holds: Budget


SCENES = {
    "one stream": Scene([Rows(CONTEXT - 1)], 32, Budget(491, 1.02), Budget(491, 1.02)),
    "many streams": Scene([Rows(CONTEXT - 1)] * 256, 2, Budget(53, 1.15), Budget(53, 1.24)),
    "prefill": Scene([Rows(CONTEXT - 512, 512)], 4, Budget(80, 2.3), Budget(80, 2.3)),
}


# Launches by the host beside the graph of a step, by the number of streams: head, sampler, results.
GRAPHS = {1: 13, 256: 13}


@pytest.mark.parametrize("streams", GRAPHS)
def test_the_host_launches_little_beside_a_graph(streams: int, tmp_path: Path) -> None:
    path, step = tmp_path / "8b.gguf", [Rows(CONTEXT - 1)] * streams
    write_large_model(path, layers=1)
    with fake_cuda() as fake:
        model = load_on_device(path, context_tokens=CONTEXT)
        steps = FakeSteps(fake, model, slots=streams, context_tokens=CONTEXT, graphs=True)
        steps.launch(step)
        counts = steps.launch(step)
    (graph,) = fake.graphs
    launched = counts.frequencies
    assert launched.pop("graph") == graph.replays == 1 and len(graph.launches) > 20
    assert sum(launched.values()) <= GRAPHS[streams], launched
    assert (counts.uploads, counts.downloads, counts.pageable_uploads) == (1, 1, 0)


@pytest.mark.parametrize("name", SCENES)
def test_step_of_a_large_model_stays_within_its_budget(name: str, tmp_path: Path) -> None:
    scene, path = SCENES[name], tmp_path / "8b.gguf"
    write_large_model(path, layers=scene.layers)
    with fake_cuda() as fake:
        model = load_on_device(path, context_tokens=CONTEXT)
        rows = sum(rows.length for rows in scene.step)
        fake.use_partly(model._token_embd.weight.data, rows * EMBEDDING_BYTES // VOCABULARY)
        steps = FakeSteps(fake, model, slots=len(scene.step), context_tokens=CONTEXT)
        steps.launch(scene.step)  # tables are made with the first step
        counts = steps.launch(scene.step)
    least = model.weight_bytes - EMBEDDING_BYTES + steps.visible_bytes(scene.step)
    found = Budget(
        len(counts.launches),
        round(counts.nbytes / least, 2),
        counts.uploads,
        counts.downloads,
        counts.pageable_uploads,
    )
    holds, goal = (vars(budget) for budget in (scene.holds, scene.goal))
    for field, value in vars(found).items():
        assert value <= holds[field], (name, field, found, counts.frequencies.most_common(20))
        assert holds[field] >= goal[field]  # a goal that is reached is a ceiling from then on
