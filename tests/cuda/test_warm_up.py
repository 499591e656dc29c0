"""The warm-up launches every kernel that serving does, in each form that Triton compiles."""

from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from runtime.engine.request import SamplingParams
from runtime.kernels.triton.launch import specialization
from tests.cuda.fake_device import FakeCuda, fake_cuda
from tests.cuda.large_model import write_large_model
from tests.cuda.steps import GREEDY, FakeSteps, Rows, load_on_device
from tests.families.text_families import TEXT_MODELS

CONTEXT, SLOTS, STEP_TOKENS = 512, 16, 256
CHAT = SamplingParams(top_k=40, top_p=0.9)
# Of all tokens, in their order and not, among 20, and with each option that has a kernel.
WAYS = (
    GREEDY,
    SamplingParams(top_k=0, top_p=0.9),
    SamplingParams(top_k=0, top_p=1.0),
    SamplingParams(top_k=20),
    SamplingParams(top_k=100, logprobs=3),
    SamplingParams(dry_multiplier=0.8),
    SamplingParams(typical_p=0.9),
)
PROMPTS = (3, 8, 23, 48, 100, 255)
DECODING = Rows(30, 1, CHAT)
STEPS = (
    *([Rows(0, rows, CHAT)] for rows in PROMPTS),
    *([Rows(0, rows - 1, CHAT), DECODING] for rows in (3, 41, 112, 200)),
    *([DECODING] * rows for rows in (1, 2, 3, 5, 9, 16)),
    [Rows(0, 7, CHAT), Rows(0, 9, CHAT), *[DECODING] * 5],
    [*[DECODING] * 15, Rows(30, 40, CHAT)],
    *([Rows(0, 12, way), Rows(30, 1, way)] for way in WAYS[1:5]),
    [Rows(30, 1, way) for way in WAYS],
)


class Compilations(FakeCuda):
    """Notes the names of kernels that Triton would compile."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []
        self._known: set[tuple[object, ...]] = set()

    def start(
        self, kernel: Any, grid: Any, arguments: Sequence[Any], options: dict[str, Any], device: Any
    ) -> None:
        super().start(kernel, grid, arguments, options, device)
        key = kernel.__name__, *options.items(), *_specialised(kernel, arguments)
        if key not in self._known:
            self._known.add(key)
            self.names.append(kernel.__name__)


def _specialised(kernel: Any, arguments: Sequence[Any]) -> list[object]:
    """As `specialization`, without what the kernel is not specialised on."""
    never, unaligned = (
        kernel.kwargs[name] or ()
        for name in ("do_not_specialize", "do_not_specialize_on_alignment")
    )
    found: list[object] = []
    for name, argument in zip(kernel.arg_names, arguments, strict=False):
        if isinstance(argument, torch.Tensor):
            aligned = argument.storage_offset() * argument.itemsize % 16 == 0
            found += [argument.dtype, name in unaligned or aligned]
        elif argument is None:
            found.append(None)
        elif name in never:
            found.append(argument.bit_length() // 32)
        elif name in unaligned:
            found += [argument == 1, argument.bit_length() // 32]
        else:
            found += specialization([argument])
    return found


def _write(name: str, path: Path) -> None:
    if name in ("Q4_K_M", "F16"):
        write_large_model(path, layers=2 if name == "Q4_K_M" else 1, label=name)
    else:
        TEXT_MODELS[name].write(path, next(iter(TEXT_MODELS[name].configs)))


@pytest.mark.parametrize("name", ["Q4_K_M", "F16", "qwen3next"])
def test_nothing_is_compiled_after_the_warm_up(name: str, tmp_path: Path) -> None:
    """Of vectors, fragments, tiles, experts and recurrent layers, and with each way of drawing; of
    an 8B model in two types, and of a family with recurrent layers."""
    path = tmp_path / "model.gguf"
    _write(name, path)
    with fake_cuda(Compilations()) as fake:
        assert isinstance(fake, Compilations)
        model = load_on_device(path, context_tokens=CONTEXT)
        steps = FakeSteps(
            fake, model, slots=SLOTS, context_tokens=CONTEXT, graphs=True, step_tokens=STEP_TOKENS
        )
        steps.warm_up()
        assert len(fake.names) > 30
        for step in STEPS:
            fake.names.clear()
            steps.launch(step)
            assert not fake.names, ([rows.length for rows in step], Counter(fake.names))
