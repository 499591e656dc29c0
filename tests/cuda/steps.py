"""Steps of the real runner on a fake device."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from math import prod
from pathlib import Path

import torch
from torch import Tensor

from model_zoo.gguf.header_only_file import HeaderOnlyFile
from model_zoo.gguf.metadata import Metadata
from model_zoo.gguf.scope import ScopeOptions, TensorScope
from model_zoo.registry import class_for
from runtime.engine import sequence as sequences
from runtime.engine.request import GenerationRequest, SamplingParams, StopRules
from runtime.engine.step_plan import Chunk, PageWrite, SlotLoad, StepPlan
from runtime.kv.cache_layout import CacheLayout
from runtime.kv.cache_types import CacheType
from runtime.kv.page_group import PageCopy
from runtime.kv.pool import KVPool
from runtime.quant.weight import Compute
from runtime.worker.input_preparer import StepLimits
from runtime.worker.model import DecoderModel
from runtime.worker.runner import DeviceRunner
from tests.cuda.fake_device import DEVICE, Counts, FakeCuda

PAGE_TOKENS = 16
GREEDY = SamplingParams(temperature=0.0)


@dataclass(frozen=True)
class Rows:
    """`length` rows of a sequence, from position `start`."""

    start: int
    length: int = 1
    sampling: SamplingParams = GREEDY


def load_on_device(path: Path, *, context_tokens: int, deterministic: bool = False) -> DecoderModel:
    """The decoder of a file on the fake device, in bfloat16 and `fine`, as `auto` chooses."""
    file = HeaderOnlyFile.open(path)
    metadata = Metadata(file.metadata, path=path)
    options = ScopeOptions(
        context_tokens=context_tokens, compute=Compute.FINE, deterministic=deterministic
    )
    scope = TensorScope(file, device=DEVICE, dtype=torch.bfloat16, options=options)
    decoder = class_for(metadata)(scope, metadata)
    scope.check()
    return decoder


class FakeSteps:
    """A model, its cache of bfloat16, and a runner that launches steps one by one."""

    def __init__(
        self,
        fake: FakeCuda,
        model: DecoderModel,
        *,
        slots: int,
        context_tokens: int,
        graphs: bool = False,
        step_tokens: int | None = None,
    ) -> None:
        self._fake, self._model = fake, model
        self._layout = CacheLayout.of(model.cache_layers, page_tokens=PAGE_TOKENS)
        self._context_tokens = context_tokens
        self._pool = KVPool(
            self._layout,
            pages=[slots * n for n in self._layout.capacity_pages(context_tokens)],
            slots=slots + 1,
            pages_per_sequence=-(-context_tokens // PAGE_TOKENS),
            type=CacheType.BFLOAT16,
            device=DEVICE,
            host_pages=[2] * len(self._layout.groups),
        )
        limits = StepLimits(slots, step_tokens or slots * context_tokens, context_tokens)
        self._runner = DeviceRunner(
            model, self._pool, self._layout, limits, device=DEVICE, recorded_bytes=int(graphs)
        )

    def warm_up(self) -> None:
        self._runner.warm_up()

    def launch(self, step: Sequence[Rows], copies: tuple[PageCopy, ...] = ()) -> Counts:
        """What a step with these rows, slot after slot, does on the device."""
        rows = sum(rows.length for rows in step)
        for part, nbytes in self._visible(step):
            written = rows * prod(part.shape[2:]) * part.element_size()
            self._fake.use_partly(part, nbytes, written=written)
        with self._fake.counting() as counts:
            launched = self._runner.launch(replace(self._plan(step), page_copies=copies))
        results = self._runner.collect(launched)
        assert len(results) == len(step) and None not in results
        return counts

    def logits(self, rows: int) -> Tensor:
        return self._model.logits(torch.empty(rows, self._model.hidden_size, device=DEVICE))

    def visible_bytes(self, step: Sequence[Rows]) -> int:
        """Keys and values that the rows see, each once."""
        return sum(nbytes for _, nbytes in self._visible(step))

    def _visible(self, step: Sequence[Rows]) -> Iterator[tuple[Tensor, int]]:
        """The pages of each layer's keys, and of its values, with their visible bytes."""
        for index in range(len(self._model.cache_layers)):
            pages = self._pool.layer(index)
            kind = self._layout.kinds[pages.group]
            seen = [kind.seen(rows.start, rows.start + rows.length) for rows in step]
            count = sum(max(ends) - min(begins) for begins, ends in seen)
            for part in (pages.keys, pages.values):
                yield part, count * prod(part.shape[2:]) * part.element_size()

    def _plan(self, step: Sequence[Rows]) -> StepPlan:
        """All slots are loaded before: a prompt that ends with the rows."""
        chunks, loads = [], []
        for slot, rows in enumerate(step):
            end = rows.start + rows.length
            prompt = (1,) * end
            request = GenerationRequest(f"{slot}", prompt, StopRules(8), rows.sampling)
            known = prompt[rows.start :]
            sequence = sequences.Sequence(request, list(prompt))
            chunks.append(Chunk(sequence, 0, slot, rows.start, rows.length, known, False, True))
            if rows.start == 0:
                loads.append(SlotLoad(slot, prompt, rows.sampling))
        return StepPlan(tuple(chunks), (PageWrite(0, 0, 0, 0),), tuple(loads))
