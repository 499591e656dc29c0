"""No step of a text family makes the host wait for the device, or mixes devices."""

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from torch import Tensor

from runtime.engine.request import SamplingParams
from runtime.kernels.selection import highest
from runtime.kernels.triton.launch import launch
from runtime.kernels.triton.selection import highest_kernel
from runtime.kv.page_group import CopyKind, PageCopy
from tests.cuda.fake_device import DEVICE, FakeCuda, Launch, fake_cuda
from tests.cuda.steps import FakeSteps, Rows, load_on_device
from tests.families.factored_files import factored
from tests.families.text_families import DIVERSE, TEXT_MODELS
from tests.gguf_files import rewrite

CONTEXT, SLOTS = 128, 5
# One for each path of the sampler, with what else it may do.
SAMPLINGS = {
    "greedy": SamplingParams(temperature=0.0, logprobs=2),
    "top": SamplingParams(top_k=9, logprobs=3),
    "sorted": SamplingParams(top_k=0, top_p=0.5, repeat_penalty=1.1, logit_bias=((3, 1.0),)),
    "whole": SamplingParams(
        top_k=0,
        top_p=1.0,
        presence_penalty=0.5,
        repeat_last_n=None,
        allowed=b"\xff\0\0\0",
        bad_words=((1, 2), (3,)),
    ),
    "chain": SamplingParams(
        typical_p=0.9, top_n_sigma=2.0, xtc_probability=0.5, dynatemp_range=0.5, dry_multiplier=1.0
    ),
}
# What adds in an order that depends on the number of rows.
UNEVEN = set(
    "mm bmm addmm addbmm baddbmm mv dot mean logsumexp vector_kernel prefill_kernel".split()
)
# Positions before the rows of each sequence, and their number.
PREFILL = [(0, 40), (30, 30), (0, 1)]
DECODING = [(40, 1), (60, 1), (1, 1), (1, 1), (90, 1)]
MIXED = [(0, 40), (17, 1), (30, 30), (64, 1), (0, 7)]


@pytest.fixture(scope="module", params=DIVERSE)
def path(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The tiny model of a family, which several tests load. It is written before there is a device,
    which would look at each operation."""
    path = tmp_path_factory.mktemp("models") / f"{request.param}.gguf"
    TEXT_MODELS[request.param].write(path, next(iter(TEXT_MODELS[request.param].configs)))
    return path


@pytest.fixture
def fake() -> Iterator[FakeCuda]:
    with fake_cuda() as device:
        yield device


def of_family(*families: str) -> pytest.MarkDecorator:
    return pytest.mark.parametrize("path", families, indirect=True)


def steps_of(
    path: Path, fake: FakeCuda, *, graphs: bool = False, deterministic: bool = False
) -> FakeSteps:
    model = load_on_device(path, context_tokens=CONTEXT, deterministic=deterministic)
    return FakeSteps(fake, model, slots=SLOTS, context_tokens=CONTEXT, graphs=graphs)


def test_steps_of_a_family_never_wait(path: Path, fake: FakeCuda) -> None:
    """Steps that decode are captured, except where layers read features of images. The sampler
    is the same for all families: other tests have its paths, and a second graph."""
    graphs = path.stem != "mllama"
    steps = steps_of(path, fake, graphs=graphs)
    for scene in (MIXED, DECODING):
        assert steps.launch([Rows(*place) for place in scene]).launches
    assert len(fake.graphs) == graphs
    assert all(graph.launches for graph in fake.graphs)
    with torch.inference_mode():
        assert steps.logits(2).dtype == torch.float32


@of_family("gemma3")
def test_steps_with_all_paths_of_the_sampler_never_wait(path: Path, fake: FakeCuda) -> None:
    """Decoding steps of two sizes are captured."""
    steps = steps_of(path, fake, graphs=True)
    paths = list(SAMPLINGS.values())
    for scene in (MIXED, DECODING, DECODING[:3]):
        rows = [Rows(*place, sampling) for place, sampling in zip(scene, paths, strict=False)]
        assert steps.launch(rows).launches
    assert len(fake.graphs) == 2
    assert all(graph.launches for graph in fake.graphs)


@of_family("gemma4")
def test_suppressed_tokens_never_wait(path: Path, tmp_path: Path, fake: FakeCuda) -> None:
    keys = {"tokenizer.ggml.suppress_tokens": [5, 7]}
    steps = steps_of(rewrite(path, tmp_path / "suppressed.gguf", keys=keys), fake, graphs=True)
    for scene in (MIXED, DECODING):
        assert "index_fill_" in steps.launch([Rows(*place) for place in scene]).frequencies
    assert len(fake.graphs) == 1


@of_family("qwen2", "phi3", "gpt-oss")
def test_products_with_factors_never_wait(path: Path, tmp_path: Path, fake: FakeCuda) -> None:
    steps = steps_of(factored(path, tmp_path / "factored.gguf"), fake, graphs=True)
    for scene in (MIXED, DECODING):
        assert steps.launch([Rows(*place) for place in scene]).launches
    assert len(fake.graphs) == 1


def test_deterministic_steps_never_wait_and_choose_no_kernel_by_rows(
    path: Path, fake: FakeCuda
) -> None:
    """Sums of torch remain: of integers in the sampler, and over the few experts of a token."""
    graphs = path.stem != "mllama"
    steps = steps_of(path, fake, graphs=graphs, deterministic=True)
    for scene in (MIXED, DECODING):
        counts = steps.launch([Rows(*place) for place in scene])
        launched = {launch.name for graph in fake.graphs for launch in graph.launches}
        launched |= counts.frequencies.keys()
        assert "tile_kernel" in launched and not launched & UNEVEN, launched & UNEVEN
    assert len(fake.graphs) == graphs


@of_family("qwen35")
def test_copies_of_pages_never_wait(path: Path, fake: FakeCuda) -> None:
    """Of keys and values in one layer, and of states in three."""
    steps = steps_of(path, fake)
    step = [Rows(40)]
    plain = steps.launch(step)
    counts = steps.launch(step, (PageCopy(0, 0, 1), PageCopy(1, 2, 3)))
    assert counts.frequencies - plain.frequencies == {"copy_": 2 * 4}
    assert counts.uploads == plain.uploads
    to, back = PageCopy(0, 4, 0, CopyKind.TO_HOST), PageCopy(1, 1, 2, CopyKind.FROM_HOST)
    counts = steps.launch(step, (to, back))
    # A page of all layers, and for each direction the numbers of the pages.
    assert counts.downloads - plain.downloads == 1 and counts.uploads - plain.uploads == 1 + 2
    assert counts.pageable_uploads == plain.pageable_uploads


@of_family("llama")
def test_steps_with_one_path_of_the_sampler_never_wait(path: Path, fake: FakeCuda) -> None:
    steps = steps_of(path, fake)
    for sampling in SAMPLINGS.values():
        for scene in (PREFILL, DECODING, MIXED):
            assert steps.launch([Rows(*place, sampling) for place in scene]).launches


WAITING: dict[str, Callable[[Tensor], object]] = {
    "reading an element": lambda x: x.sum().item(),
    "deciding by an element": lambda x: bool(x.any()),
    "a list": lambda x: x.tolist(),
    "indices of elements": lambda x: x.nonzero(),
    "a selection by elements": lambda x: x[x > 0],
    "different elements": lambda x: x.unique(),
    "a copy to the host": lambda x: x.cpu(),
    "a copy to pinned memory": lambda x: torch.empty(4, pin_memory=True).copy_(x),
    "a copy to memory that is not pinned": lambda x: torch.empty(4).copy_(x, non_blocking=True),
    "two devices": lambda x: x + torch.ones(4),
}


@pytest.mark.parametrize("name", WAITING)
def test_an_operation_that_waits_is_detected(name: str, fake: FakeCuda) -> None:
    with torch.inference_mode(), pytest.raises((RuntimeError, AssertionError)):
        WAITING[name](torch.ones(4, device=DEVICE))


def test_launches_bytes_and_copies_are_counted(fake: FakeCuda) -> None:
    pinned = torch.zeros(8, pin_memory=True)
    with torch.inference_mode(), fake.counting() as counts:
        x = torch.empty(8, device=DEVICE)
        x[:4].copy_(pinned[:4], non_blocking=True)
        y = torch.arange(4).to(DEVICE)
        torch.tensor([1, 2], device=DEVICE)
        assert (counts.uploads, counts.pageable_uploads, counts.nbytes) == (3, 2, 0)
        rows = x.view(8, 1).expand(8, 16)[y]  # reads 4 indices and 4 rows of 16 numbers
        assert counts.nbytes == 4 * 8 + 2 * 4 * 16 * 4
        rows.add_(1.0)
        assert counts.frequencies == {"index": 1, "add_": 1}
        pinned[:4].copy_(rows[:, 0], non_blocking=True)
        assert counts.downloads == 1 and pinned.tolist() == [1.0] * 4 + [0.0] * 4


def test_triton_kernels_are_launches_with_the_bytes_of_their_tensors(fake: FakeCuda) -> None:
    with torch.inference_mode(), fake.counting() as counts:
        values, cache = torch.empty(3, 100, device=DEVICE), torch.empty(1000, device=DEVICE)
        chosen = highest(values, 7)
        assert counts.launches == [Launch("highest_kernel", 3 * 100 * 4 + 3 * 7 * 8)]
        fake.use_partly(cache, 36)
        constants = {"COUNT": 7, "PADDED": 128}
        launch(highest_kernel, (5,), cache[10:], chosen, 990, **constants, device=DEVICE)
        nothing = (0,)
        launch(highest_kernel, nothing, cache, chosen, 990, **constants, device=DEVICE)
        assert counts.launches[1:] == [Launch("highest_kernel", 36 + 3 * 7 * 8)]
        with pytest.raises(AssertionError, match="highest_kernel has an argument on cpu"):
            launch(highest_kernel, (5,), torch.ones(4), chosen, 4, **constants, device=DEVICE)
