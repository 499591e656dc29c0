"""What tests compile ahead of time is the code that is launched."""

from pathlib import Path
from typing import Any

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
# By vectors and by tiles, with each way of drawing.
STEPS = (
    [Rows(CONTEXT - 1)],
    [Rows(CONTEXT - 1, sampling=SamplingParams(top_k=40))] * 16,
    [Rows(CONTEXT - 1, sampling=SamplingParams(top_k=0, top_p=0.5))],
)


class Launches(FakeCuda):
    """Notes by kernel whether products may be fused with sums."""

    def __init__(self) -> None:
        super().__init__()
        self.fused: dict[str, bool] = {}

    def start(self, kernel: Any, *given: Any) -> None:
        super().start(kernel, *given)
        _, _, options, _ = given
        self.fused[kernel.__name__] = options.get("enable_fp_fusion", True)


def test_products_are_fused_with_sums_as_at_the_launch(tmp_path: Path) -> None:
    write_large_model(tmp_path / "8b.gguf", layers=1)
    with fake_cuda(Launches()) as fake:
        model = load_on_device(tmp_path / "8b.gguf", context_tokens=CONTEXT)
        steps = FakeSteps(fake, model, slots=16, context_tokens=CONTEXT)
        for step in STEPS:
            steps.launch(step)
    assert not all(fake.fused.values())
    assert fake.fused == {name: SPECIMENS[name].fused for name in fake.fused}
