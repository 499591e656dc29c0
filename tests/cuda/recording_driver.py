"""A driver of Triton that loads nothing and records launches: `python -m
tests.cuda.recording_driver` prints those of a kernel, and how Triton specialises arguments, as
JSON."""

import json
from types import SimpleNamespace
from typing import Any

import torch
import triton
import triton.language as tl
from triton._C.libtriton import native_specialize_impl
from triton.backends.compiler import GPUTarget
from triton.backends.nvidia.compiler import CUDABackend
from triton.backends.nvidia.driver import CudaDriver
from triton.runtime import driver

from runtime.kernels.triton.launch import launch, specialization

CPU = torch.device("cpu")
TARGET = GPUTarget("cuda", 90, 32)
LARGE = 2**31
NUMBERS = torch.zeros(64, dtype=torch.float32)
# Numbers, and tensors by their type and address.
ARGUMENTS: dict[str, Any] = {
    **{str(n): n for n in (0, 1, 2, 15, 16, 17, 32, -1, -16, LARGE - 1, LARGE, LARGE + 1)},
    **{str(n): n for n in (-LARGE, -LARGE - 1, 2**32, 2**33 + 16, 2**63 - 1, 2**63, 2**63 + 16)},
    **{str(value): value for value in (None, True, False, 1.0, 0.0, 16.0, 2.5)},
    **{f"float32 at {place}": NUMBERS[place:] for place in (0, 1, 4)},
    "bfloat16 at 0": NUMBERS.view(torch.bfloat16),
    "bfloat16 at 1": NUMBERS.view(torch.bfloat16)[1:],
    "uint8 at 16": NUMBERS.view(torch.uint8)[16:],
}


class RecordingDriver(CudaDriver):
    """Stands for one H100."""

    def __init__(self) -> None:
        self.launched: list[tuple[Any, ...]] = []
        self.launcher_cls = self._launcher
        self.utils = SimpleNamespace(
            load_binary=lambda *of: (1, 1, 32, 0, 1024),
            get_device_properties=lambda device: {"max_shared_mem": 232_448},
        )
        self.get_current_device = lambda: 0
        self.get_current_stream = lambda device: 0
        self.get_device_capability = lambda device: (TARGET.arch // 10, TARGET.arch % 10)

    def get_current_target(self) -> GPUTarget:
        return TARGET

    def _launcher(self, source: Any, metadata: Any) -> Any:
        """Grid, stream, function, metadata of two kinds and two hooks come before arguments."""
        kernel = metadata.name, metadata.num_warps, sorted(map(str, source.attrs.items()))

        def record(*given: Any) -> None:
            arguments = [str(a.dtype) if isinstance(a, torch.Tensor) else a for a in given[9:]]
            self.launched.append((*kernel, given[:3], arguments))

        return record


@triton.jit
def scale_kernel(x, result, count, factor, absent, SIZE: tl.constexpr, SIGN: tl.constexpr):
    place = tl.program_id(0) * SIZE + tl.arange(0, SIZE)
    values = tl.load(x + place, mask=place < count) * factor
    tl.store(result + place, values if SIGN is None else -values, mask=place < count)


def launches(recording: RecordingDriver, count: int, begin: int, **options: Any) -> None:
    some = NUMBERS[begin:]
    launch(
        scale_kernel, (2, 1), some, some, count, 0.5, None, SIGN=None, device=CPU, **options
    )  # fmt: skip


def main() -> None:
    recording = RecordingDriver()
    driver.set_active(recording)
    of_launches, run, runs = [], scale_kernel.run, []
    scale_kernel.run = lambda *given, **options: runs.append(options) or run(*given, **options)
    for count, begin, options in (
        (33, 0, {"SIZE": 32, "num_warps": 1}),
        (48, 0, {"SIZE": 32, "num_warps": 1}),
        (33, 1, {"SIZE": 32, "num_warps": 1}),
        (33, 0, {"SIZE": 64, "num_warps": 1}),
        (33, 0, {"SIZE": 32, "num_warps": 2}),
    ):
        recording.launched.clear()
        for _ in range(3):  # by Triton, then as remembered
            launches(recording, count, begin, **options)
        of_launches.append(recording.launched.copy())
    kinds = {
        name: [
            str(specialization([argument])),
            str(native_specialize_impl(CUDABackend, argument, False, True, True)),
        ]
        for name, argument in ARGUMENTS.items()
    }
    print(json.dumps({"launches": of_launches, "by_triton": len(runs), "kinds": kinds}))


if __name__ == "__main__":
    main()
