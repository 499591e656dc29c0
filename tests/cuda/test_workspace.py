"""The memory that is reserved for kernels of CUDA devices."""

from pathlib import Path

from runtime.kernels.workspace import DENSE_ELEMENTS, MOST_STATE_BYTES, workspace_bytes
from runtime.kv.cache_kinds import Full
from runtime.kv.cache_layout import LayerCache
from runtime.worker.input_preparer import StepLimits
from runtime.worker.step_graphs import graph_bytes
from tests.cuda.fake_device import DEVICE, fake_cuda
from tests.cuda.large_model import SHAPE, VOCABULARY, write_large_model
from tests.cuda.steps import load_on_device

CACHES = (LayerCache(Full(), 8, 128, 128),)
WITHOUT_KERNELS = (7, 0)


def test_memory_of_the_twins_is_reserved_only_where_they_compute() -> None:
    found = []
    for capability in (WITHOUT_KERNELS, (9, 0)):
        with fake_cuda(capability=capability):
            found.append(workspace_bytes(DEVICE, largest_matrix=1 << 30, caches=CACHES))
    twins, kernels = found
    assert 4 * DENSE_ELEMENTS + MOST_STATE_BYTES < kernels < twins / 2


def test_half_a_gibibyte_is_enough_for_each_workspace_of_an_8b_model(tmp_path: Path) -> None:
    """That of the activations, and that of the graphs of decode steps."""
    write_large_model(tmp_path / "8b.gguf", layers=1)
    with fake_cuda():
        model = load_on_device(tmp_path / "8b.gguf", context_tokens=4096)
        matrix = SHAPE.hidden * VOCABULARY
        workspace = workspace_bytes(DEVICE, largest_matrix=matrix, caches=model.cache_layers)
        assert workspace < 1 << 29
        assert model.activation_bytes(512, 16) < 700 << 20
        assert graph_bytes(model, StepLimits(16, 2048, 4096)) < 720 << 20
