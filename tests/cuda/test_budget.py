"""The launches and copies of a step of an 8B model, counted on a fake CUDA device."""

from collections import Counter
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest

from bench.make_model import MOE_SHAPE, Shape, kind_of
from runtime.engine.request import SamplingParams
from tests.cuda.fake_device import fake_cuda
from tests.cuda.large_model import SHAPE, write_large_model
from tests.cuda.steps import FakeSteps, Rows, load_on_device

CONTEXT = 1024
LAYERS = 32
# What a model of 4 layers has more than one of 2, a layer of each mixture of block types, is what
# each further pair of the 32 layers adds; head and sampler count once.
DEPTHS = (2, 4)


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
    """A step of a model with so many of its 32 layers; None: of 32, derived from `DEPTHS`. budget:
    what kernels have reached, to be lowered with every kernel. The goals were 500 launches and 1.15
    times the bytes of a step. Wide tiles exceed the first by copies of activations in the order of
    tensor cores, four for each layer; many streams have another launch for rows with long contexts
    among them. Prefill dequantises weights to memory for cuBLAS.
    """

    step: tuple[Rows, ...]
    layers: int | None
    budget: Budget


SCENES = {
    "one stream": Scene((Rows(CONTEXT - 1),), None, Budget(350, 1.01)),
    "streams of fragments": Scene((Rows(CONTEXT - 1),) * 64, None, Budget(445, 1.056)),
    "many streams": Scene((Rows(CONTEXT - 1),) * 256, None, Budget(557, 1.153)),
    "prefill": Scene((Rows(CONTEXT - 512, 512),), 4, Budget(73, 4.46)),
}


# Launches by the host beside the graph of a step: head, sampler, results.
GRAPHS: dict[str, tuple[list[Rows], int]] = {
    "prompt": ([Rows(CONTEXT - 512, 512)], 13),
    "prompt with padding": ([Rows(CONTEXT - 510, 510)], 13),
    "one stream": ([Rows(CONTEXT - 1)], 13),
    "many streams": ([Rows(CONTEXT - 1)] * 256, 13),
    "DRY": ([Rows(CONTEXT - 1, sampling=SamplingParams(top_k=40, dry_multiplier=0.8))], 16),
}


@pytest.mark.parametrize("name", GRAPHS)
def test_the_host_launches_little_beside_a_graph(name: str, tmp_path: Path) -> None:
    path, (step, most) = tmp_path / "8b.gguf", GRAPHS[name]
    streams = len(step)
    write_large_model(path, layers=1)
    with fake_cuda() as fake:
        model = load_on_device(path, context_tokens=CONTEXT)
        steps = FakeSteps(fake, model, slots=streams, context_tokens=CONTEXT, graphs=True)
        steps.launch(step)
        counts = steps.launch(step)
    (graph,) = fake.graphs
    launched = counts.frequencies
    assert launched.pop("graph") == graph.replays == 1 and len(graph.launches) > 15
    assert sum(launched.values()) <= most, launched
    assert (counts.uploads, counts.downloads, counts.pageable_uploads) == (1, 1, 0)


@pytest.mark.parametrize("name", SCENES)
def test_step_of_a_large_model_stays_within_its_budget(name: str) -> None:
    scene = SCENES[name]
    if scene.layers is None:
        measured = _derived(scene.step, LAYERS)
    else:
        measured = _measured(scene.step, scene.layers)
    _check(measured, scene.budget)


def test_step_of_a_large_model_is_the_sum_of_its_layers() -> None:
    """Of 8, in a quarter of the time of 32: half of either have each mixture of block types."""
    for layers in (*DEPTHS, 8, LAYERS):
        kinds = Counter(kind_of("Q4_K_M", "ffn_down", layer, layers) for layer in range(layers))
        assert [*kinds.values()] == [layers // 2] * 2
    step = SCENES["one stream"].step
    derived, measured = _derived(step, 8), _measured(step, 8)
    assert (derived.sums, derived.copies) == (measured.sums, measured.copies)


# Steps of two layers and a head in plain numbers, of a model in bfloat16: type, shape, streams. All
# experts count as read; with 16 streams, each may have a row.
PLAIN = {
    "BF16, one stream": ("BF16", SHAPE, 1, Budget(35, 1.003)),
    "F16, one stream": ("F16", SHAPE, 1, Budget(39, 1.004)),
    "BF16, many streams": ("BF16", SHAPE, 96, Budget(35, 1.066)),
    "F16, many streams": ("F16", SHAPE, 96, Budget(39, 1.083)),
    "experts in BF16": ("BF16", MOE_SHAPE, 16, Budget(69, 1.024)),
    "experts in F16": ("F16", MOE_SHAPE, 16, Budget(73, 1.027)),
}


@pytest.mark.parametrize("name", PLAIN)
def test_plain_numbers_are_not_expanded_in_memory(name: str) -> None:
    """Neither those of another type than the rows nor those of the head and of experts."""
    label, shape, streams, budget = PLAIN[name]
    _check(_measured((Rows(CONTEXT - 1),) * streams, 2, label, shape), budget)


@dataclass(frozen=True)
class Measured:
    """sums: launches, bytes that move, and weights with visible cache; copies: uploads, downloads,
    pageable uploads; kinds: the most frequent launches."""

    sums: tuple[int, int, int]
    copies: tuple[int, int, int]
    kinds: list[tuple[str, int]]


def _check(measured: Measured, budget: Budget) -> None:
    launches, nbytes, least = measured.sums
    found = Budget(launches, round(nbytes / least, 3), *measured.copies)
    for field, value in vars(found).items():
        assert value <= getattr(budget, field), (field, found, measured.kinds)


@cache
def _measured(
    step: tuple[Rows, ...], layers: int, label: str = "Q4_K_M", shape: Shape = SHAPE
) -> Measured:
    with TemporaryDirectory() as folder, fake_cuda() as fake:
        path = Path(folder) / "8b.gguf"
        write_large_model(path, layers=layers, label=label, shape=shape)
        model = load_on_device(path, context_tokens=CONTEXT)
        rows = sum(rows.length for rows in step)
        embedding = model._token_embd.weight.data
        fake.use_partly(embedding, rows * embedding.shape[1])
        steps = FakeSteps(fake, model, slots=len(step), context_tokens=CONTEXT)
        steps.launch(step)  # tables are made with the first step
        counts = steps.launch(step)
    least = model.weight_bytes - embedding.nbytes + steps.visible_bytes(step)
    return Measured(
        (len(counts.launches), counts.nbytes, least),
        (counts.uploads, counts.downloads, counts.pageable_uploads),
        counts.frequencies.most_common(20),
    )


def _derived(step: tuple[Rows, ...], layers: int) -> Measured:
    """A step of the model with so many layers, from those of models with fewer."""
    few, more = (_measured(step, depth) for depth in DEPTHS)
    assert few.copies == more.copies
    steps = (layers - DEPTHS[0]) // (DEPTHS[1] - DEPTHS[0])
    launches, nbytes, least = (
        a + steps * (b - a) for a, b in zip(few.sums, more.sums, strict=True)
    )
    return Measured((launches, nbytes, least), few.copies, more.kinds)
