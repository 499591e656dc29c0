"""What tests compile ahead of time is the code that is launched."""

import inspect
from typing import Any

import pytest

from runtime.engine.request import SamplingParams
from tests.cuda import (
    attention_specimens,
    draw_specimens,
    pointwise_specimens,
    product_specimens,
)
from tests.cuda.fake_device import FakeCuda, fake_cuda
from tests.cuda.large_model import write_large_model
from tests.cuda.steps import FakeSteps, Rows, load_on_device

CONTEXT = 1024
MODULES = attention_specimens, draw_specimens, pointwise_specimens, product_specimens
SPECIMENS = {
    specimen.kernel.__name__: specimen
    for module in MODULES
    for specimen in module.specimens(90).values()
}
# By vectors, by fragments and by wide tiles, with each way of drawing.
STEPS = (
    [Rows(CONTEXT - 1)],
    [Rows(CONTEXT - 1, sampling=SamplingParams(top_k=40))] * 16,
    [Rows(CONTEXT - 65, 65, SamplingParams(top_k=0, top_p=0.5))],
    [Rows(0, CONTEXT - 1, SamplingParams(dry_multiplier=0.8))],
)


class Launches(FakeCuda):
    """Notes by kernel whether products may be fused with sums, and whether it may begin while the
    previous launch ends."""

    def __init__(self) -> None:
        super().__init__()
        self.fused: dict[str, bool] = {}
        self.overlaps: dict[str, bool] = {}
        self.sources: dict[str, str] = {}

    def start(self, kernel: Any, *given: Any) -> None:
        super().start(kernel, *given)
        _, _, options, _ = given
        self.fused[kernel.__name__] = options.get("enable_fp_fusion", True)
        self.overlaps[kernel.__name__] = options.get("launch_pdl", False)
        self.sources[kernel.__name__] = inspect.getsource(kernel.fn)


@pytest.fixture(scope="module")
def launches(tmp_path_factory: pytest.TempPathFactory) -> Launches:
    """Of some steps of a model."""
    path = tmp_path_factory.mktemp("model") / "8b.gguf"
    write_large_model(path, layers=1)
    with fake_cuda(Launches()) as fake:
        model = load_on_device(path, context_tokens=CONTEXT)
        steps = FakeSteps(fake, model, slots=16, context_tokens=CONTEXT)
        for step in STEPS:
            steps.launch(step)
    return fake


def test_products_are_fused_with_sums_as_at_the_launch(launches: Launches) -> None:
    assert not all(launches.fused.values())
    assert launches.fused == {name: SPECIMENS[name].fused for name in launches.fused}


def test_kernels_that_may_begin_early_wait(launches: Launches) -> None:
    waiting = {name for name, text in launches.sources.items() if "wait_for_previous()" in text}
    assert {name for name, early in launches.overlaps.items() if early} == waiting
    assert waiting >= {"vector_kernel", "round_kernel", "add_norm_kernel", "merge_kernel"}
    assert waiting >= {"fragment_kernel", "arrange_rows_kernel", "wide_tile_kernel"}
