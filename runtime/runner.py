"""Launches planned steps on the device and reads back what they drew."""

from dataclasses import dataclass

import torch
from torch import Tensor

from runtime.errors import DoesNotFitError, ModelFileError
from runtime.kv.pool import KVPool
from runtime.kv.spec import CacheLayout
from runtime.model import AttentionPlan, Batch, DecoderModel
from runtime.request import (
    MAX_TOP_LOGPROBS,
    Alternative,
    DrawFailure,
    GenerationRequest,
    Outcome,
    Sampled,
    SamplingParams,
    StopRules,
)
from runtime.sampler import Drawn, Sampler
from runtime.scheduler import Chunk, Sequence, SlotLoad, StepPlan
from runtime.staging import Stage, Staged

_NOT_FINITE = DrawFailure("The model returned logits that are not finite numbers.")


@dataclass(frozen=True, slots=True)
class Launched:
    """A step on its way: `drawing` names the chunk of each drawn row, `done` tells the end."""

    chunks: tuple[Chunk, ...]
    drawing: tuple[int, ...]
    drawn: Drawn
    done: torch.cuda.Event | None


class DeviceRunner:
    """One model, its cache and its sampler on one device.

    Tokens are uploaded once, when their sequence enters a slot; each step reads its input from the
    slot's tokens on the device, where the sampler puts what it draws. So the host never has to
    know a token before the step that uses it.
    """

    def __init__(
        self,
        model: DecoderModel,
        pool: KVPool,
        layout: CacheLayout,
        *,
        slots: int,
        step_tokens: int,
        context_tokens: int,
        device: torch.device,
    ) -> None:
        self._model = model
        self._pool = pool
        self._page_tokens = layout.page_tokens
        self._slots = slots
        self._step_tokens = step_tokens
        self._context_tokens = context_tokens
        self._device = device
        self._sampler = Sampler(
            slots=slots, context_tokens=context_tokens, vocab_size=model.vocab_size, device=device
        )
        self._stage = Stage(
            layout,
            pool,
            self._sampler,
            slots=slots,
            step_tokens=step_tokens,
            context_tokens=context_tokens,
            device=device,
        )
        self._fresh = True

    @torch.inference_mode()
    def launch(self, plan: StepPlan) -> Launched:
        """Enqueue one step; on CUDA nothing here waits for it."""
        self._fresh = False
        staged = self._stage.stage(plan)
        self._apply(staged)
        logits = self._model.forward(self._batch(staged), self._pool)
        drawn = self._sampler.sample(logits, staged.draws)
        if self._device.type != "cuda":
            return Launched(plan.chunks, staged.drawing, drawn, None)
        host = _copied_to_host(drawn)
        done = torch.cuda.Event()
        done.record(torch.cuda.current_stream(self._device))
        return Launched(plan.chunks, staged.drawing, host, done)

    def collect(self, launched: Launched) -> tuple[Outcome | None, ...]:
        """Wait for a step; what it drew, aligned with its chunks. The only place that waits."""
        if launched.done is not None:
            launched.done.synchronize()
        drawn = launched.drawn
        results: list[Outcome | None] = [None] * len(launched.chunks)
        scores = _Scores(drawn)
        rows = zip(launched.drawing, drawn.tokens.tolist(), drawn.finite.tolist(), strict=True)
        for index, token, finite in rows:
            wanted = launched.chunks[index].sequence.request.sampling.logprobs
            sampled = Sampled(token) if wanted is None else scores.next(token, wanted)
            results[index] = sampled if finite else _NOT_FINITE
        return tuple(results)

    def warm_up(self) -> None:
        """Run the largest step, before any other, so that missing memory shows now.

        Then the largest decode step and the smallest, which may take other kernels. All rows write
        to page 0, which is cleared afterwards; slots are loaded before use.
        """
        assert self._fresh, "warm_up comes before the first step"
        try:
            for rows, slots in (
                (self._step_tokens, self._slots),
                (self._slots, self._slots),
                (1, 1),
            ):
                if _NOT_FINITE in self.collect(self.launch(self._scratch_plan(rows, slots))):
                    raise ModelFileError(f"The model cannot compute: {_NOT_FINITE.reason}")
        except (RuntimeError, MemoryError) as error:
            if not _is_lack_of_memory(error):
                raise
            raise DoesNotFitError(
                f"A step of {self._step_tokens:,} tokens over {self._slots:,} sequences does not "
                f"fit in the memory left on {self._device}: {error} Lower `step_tokens`, "
                "`max_sequences` or `cache_tokens`."
            ) from error
        self._pool.clear_page(0)
        self._fresh = True

    def _apply(self, staged: Staged) -> None:
        if staged.pages.shape[0]:
            self._pool.write_pages(staged.page_cells, staged.pages)
        if staged.loads is not None:
            for slot, tokens in staged.loads.tokens:
                self._sampler.load_tokens(slot, tokens)
            self._sampler.load_parameters(
                staged.loads.slots, staged.loads.floats, staged.loads.ints
            )

    def _batch(self, staged: Staged) -> Batch:
        positions, slots = staged.positions, staged.row_slot.long()
        indices, offsets = positions // self._page_tokens, positions % self._page_tokens
        plans = []
        for table, (begin, end) in zip(self._pool.page_tables, staged.visible, strict=True):
            cells = table[slots, indices].long() * self._page_tokens + offsets
            plans.append(AttentionPlan(table, staged.row_slot, begin, end, cells, staged.spans))
        tokens = self._sampler.tokens_at(slots, positions)
        return Batch(tokens, positions, staged.output_rows, tuple(plans))

    def _scratch_plan(self, rows: int, slots: int) -> StepPlan:
        """One row at the end of each slot's context; the rows left over fill slot after slot.

        Everything a row can ask of the sampler is asked.
        """
        room = self._context_tokens - 1  # the token drawn last has a place too
        sampling = SamplingParams(
            top_k=0, top_p=0.5, repeat_penalty=1.1, repeat_last_n=None, logprobs=MAX_TOP_LOGPROBS
        )
        left = rows - slots
        chunks, loads = [], []
        for slot in range(slots):
            length = min(room, 1 + left)
            left -= length - 1
            request = GenerationRequest(f"warm-up-{slot}", (0,), StopRules(1), sampling)
            sequence = Sequence(request, [0])
            start, known = room - length, (0,) * length
            chunks.append(Chunk(sequence, 0, slot, start, length, known, False, True))
            loads.append(SlotLoad(slot, (0,) * room, sampling))
        return StepPlan(tuple(chunks), (), tuple(loads))


class _Scores:
    """The log-probabilities of the scored rows, in order."""

    def __init__(self, drawn: Drawn) -> None:
        self._rows = zip(
            drawn.logprobs.tolist(),
            drawn.top_tokens.tolist(),
            drawn.top_logprobs.tolist(),
            strict=True,
        )

    def next(self, token: int, alternatives: int) -> Sampled:
        logprob, tokens, logprobs = next(self._rows)
        pairs = zip(tokens[:alternatives], logprobs[:alternatives], strict=True)
        return Sampled(token, logprob, tuple(Alternative(*pair) for pair in pairs))


def _is_lack_of_memory(error: Exception) -> bool:
    """On CUDA torch has a type for it, on a CPU only these words."""
    named = isinstance(error, torch.OutOfMemoryError | MemoryError)
    return named or "can't allocate memory" in str(error)


def _copied_to_host(drawn: Drawn) -> Drawn:
    """The same in pinned memory; valid once the stream has come this far."""

    def pinned(tensor: Tensor) -> Tensor:
        host = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
        return host.copy_(tensor, non_blocking=True)

    return Drawn(
        pinned(drawn.tokens),
        pinned(drawn.finite),
        pinned(drawn.logprobs),
        pinned(drawn.top_tokens),
        pinned(drawn.top_logprobs),
    )
