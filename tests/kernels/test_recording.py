"""Recorded kernel calls: repeated with other inputs they give what a new computation gives."""

import gc
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from runtime.kernels.matmul import matmul
from runtime.kernels.native import library
from runtime.kernels.pointwise import add_, rms_norm, silu_mul, take_rows
from runtime.kernels.recording import Arena, NotRecordableError, record
from runtime.quant.block_types import block_type
from runtime.quant.weight import Compute
from tests.kernels.native_kernels import require_native_kernels
from tests.kernels.random_weights import random_weight

WIDTH = 70
NBYTES = 1 << 16


@pytest.fixture(autouse=True)
def native() -> None:
    require_native_kernels()


def computed(x: Tensor, rows: Tensor) -> Tensor:
    """Views, kernels that change a tensor, and tensors that are unreferenced before the end."""
    gate, up = x.split([WIDTH, WIDTH], dim=1)
    for _ in range(20):
        up = silu_mul(gate, rms_norm(up, None, 1e-5))
        up = add_(up, gate, scale=0.5)
    return take_rows(up.unflatten(1, (2, -1)).flatten(1), rows)


def test_a_replay_computes_with_the_new_values_of_the_inputs() -> None:
    x, rows = torch.zeros(5, 2 * WIDTH), torch.zeros(3, dtype=torch.int64)
    recording = record(lambda: computed(x, rows), Arena(NBYTES))
    kernels = library()
    assert kernels is not None
    for _ in range(3):
        x.normal_()
        rows.random_(0, 5)
        gc.collect()
        torch.testing.assert_close(
            recording.replay(kernels), computed(x, rows), rtol=0, atol=0, equal_nan=True
        )


def test_recordings_share_the_memory_of_an_arena() -> None:
    """The calls take 20 times as much as is in use at once."""
    arena, kernels = Arena(5 * WIDTH * 4 * 6), library()
    assert kernels is not None
    inputs = [(torch.randn(n, 2 * WIDTH), torch.arange(n)) for n in (1, 3, 5)]
    recordings = [record(lambda pair=pair: computed(*pair), arena) for pair in inputs]
    for recording, pair in zip(recordings, inputs, strict=True):
        assert torch.equal(recording.replay(kernels), computed(*pair))


@pytest.mark.parametrize("threads", [2, 3, 7])
def test_threads_of_a_replay_compute_the_bits_of_one_thread(threads: int) -> None:
    """So large that each kernel is divided, and on more threads than some machines have."""
    rows, width = 20, 2048
    fine = replace(random_weight(block_type("Q4_0"), width, width), compute=Compute.FINE)
    exact = random_weight(block_type("Q8_0"), width, width)
    x, kernels, before = torch.empty(rows, width), library(), torch.get_num_threads()
    assert kernels is not None

    def step() -> Tensor:
        y = rms_norm(x, None, 1e-5)
        for weight in (fine, exact, fine):
            y = add_(matmul(silu_mul(y, x), weight), x)
        return matmul(rms_norm(y, None, 1e-5), exact)

    try:
        torch.set_num_threads(threads)
        recording = record(step, Arena(8 * rows * width * 4))
        for seed in range(8):
            x.normal_(generator=torch.Generator().manual_seed(seed))
            torch.set_num_threads(1)
            expected = step()
            torch.set_num_threads(threads)
            assert torch.equal(recording.replay(kernels), expected)
            assert torch.equal(step(), expected)
    finally:
        torch.set_num_threads(before)


def test_a_computation_with_too_little_memory_is_not_recorded() -> None:
    x = torch.ones(9, 99)
    with pytest.raises(NotRecordableError, match="bytes"):
        record(lambda: rms_norm(x, None, 1e-5), Arena(128))


@pytest.mark.parametrize(
    "operation",
    [
        lambda x: x + 1,
        lambda x: x.mul_(2),
        lambda x: x.clone(),
        lambda x: x.t().contiguous(),
        lambda x: x.double(),
        lambda x: rms_norm(x[:, ::2], None, 1e-5),
        lambda x: torch.tensor([[1.0]]),
        lambda x: x if x[0, 0] > 0 else x[:1],
        lambda x: x[: int(x.sum())],
        lambda x: x[: len(x.tolist())],
        lambda x: x[: len(x.numpy())],
        lambda x: torch.zeros(3),
    ],
)
def test_operations_of_torch_are_not_recordable(operation) -> None:
    x = torch.ones(4, 6)
    with pytest.raises(NotRecordableError, match="it uses"):
        record(lambda: operation(x), Arena(NBYTES))
    assert torch.equal(rms_norm(x, None, 0.0), x / x.square().mean().sqrt())  # still computes


def test_a_call_that_fails_is_reported_by_its_name() -> None:
    x, rows = torch.randn(4, 8), torch.zeros(2, dtype=torch.int64)
    recording = record(lambda: take_rows(x, rows), Arena(NBYTES))
    rows[1] = 4
    kernels = library()
    assert kernels is not None
    with pytest.raises(RuntimeError, match="caravan_take_rows"):
        recording.replay(kernels)
