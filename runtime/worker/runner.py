"""Launches planned steps on the device and reads back their results."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch
from torch import Tensor

from runtime.engine.request import DrawFailure, Result
from runtime.engine.step_plan import StepPlan
from runtime.errors import DoesNotFitError, ModelFileError
from runtime.kernels.slot_tables import slot_entries
from runtime.kernels.triton.launch import has_kernels
from runtime.kv.cache_layout import CacheLayout
from runtime.kv.pool import PagePool
from runtime.vision.encoder import ImageLimits
from runtime.vision.image_rows import FeatureRows
from runtime.worker.input_preparer import DeviceInputs, InputPreparer, StepLimits, unpadded
from runtime.worker.mask_worker import MaskWorker, Unmasked
from runtime.worker.model import AttentionPlan, Batch, DecoderModel, ImageWrite
from runtime.worker.pooling import Pooler
from runtime.worker.prompt_scores import TokenScores
from runtime.worker.recorded_steps import RecordedSteps, StepOutput, recorder_of
from runtime.worker.sampler import Drawn, Sampler
from runtime.worker.scratch_steps import ScratchModel, scratch_plan, scratch_steps
from runtime.worker.step_results import NOT_FINITE, Launched, ResultCopier, outcomes

# An image's digest -> its features on the device, [rows, width], padding rows last.
FeatureLookup = Callable[[bytes], Tensor]


class DeviceRunner:
    """One model, its cache and its sampler on one device.

    A sequence's tokens are uploaded once, when it enters a slot. Each step reads its input from the
    slot's tokens on the device, to which the sampler appends, so a step that uses a token can be
    launched before the host knows it. `recorded_bytes`: memory for recorded steps; 0 for none.
    """

    def __init__(
        self,
        model: DecoderModel,
        pool: PagePool,
        layout: CacheLayout,
        limits: StepLimits,
        *,
        device: torch.device,
        image_features: FeatureLookup | None = None,
        recorded_bytes: int = 0,
    ) -> None:
        self._model = model
        self._image_features = image_features
        self._pool = pool
        self._page_tokens, self._kinds = layout.page_tokens, layout.kinds
        self._limits = limits
        self._device = device
        slots, vocab_size = limits.slots, model.vocab_size
        self._sampler = Sampler(  # with one slot for padding
            slots=slots + 1,
            context_tokens=limits.context_tokens,
            vocab_size=vocab_size,
            device=device,
        )
        stateful = any(kind.by_sequence for kind in self._kinds)  # positions are computed once only
        self._masks = MaskWorker(
            rows=limits.draws, vocab_size=vocab_size, device=device, waits=stateful
        )
        self._recorded: RecordedSteps | None = None
        if recorded_bytes:
            recorder = recorder_of(limits, device, nbytes=recorded_bytes)
            self._recorded = RecordedSteps(model, pool, recorder, stateful=stateful)
        self._preparer = InputPreparer(
            layout,
            pool,
            self._sampler,
            limits,
            device=device,
            position_axes=model.position_axes,
            padded_rows=self._recorded.rows if self._recorded else unpadded,
            room=self._recorded.most_span_rows if self._recorded else 0,
        )
        self._pooler = Pooler(slots=slots, hidden=model.hidden_size, device=device)
        self._copier = None
        if device.type == "cuda":
            self._copier = ResultCopier(limits, hidden=model.hidden_size, device=device)
        self._fresh = True
        self._scratch: Tensor | None = None  # features during warm-up

    @property
    def recorded_rows(self) -> frozenset[int]:
        """The numbers of rows of which a step is recorded."""
        return self._recorded.recorded_rows if self._recorded else frozenset()

    @torch.inference_mode()
    def launch(self, plan: StepPlan) -> Launched:
        """Enqueue one step; on CUDA nothing here waits for the device."""
        self._fresh = False
        changes, inputs = self._preparer.prepare(plan)
        if changes.pages is not None:
            self._pool.write_pages(changes.pages.cells, changes.pages.pages)
        if plan.page_copies:
            self._pool.copy_pages(plan.page_copies)
        if plan.key_shifts:
            self._pool.shift_keys(plan.key_shifts)
        if changes.loads is not None:
            self._sampler.load(changes.loads)
        if changes.proposed is not None:
            self._sampler.propose(changes.proposed)
        compute = self._prepared(inputs)
        # Last, because the mask thread and this one contend for the interpreter outside kernels.
        constrained = {row: plan.chunks[inputs.drawing[row]] for row in inputs.constrained}
        pending = self._masks.begin(constrained, step_chunks=len(plan.chunks))
        states, drawn = compute()
        draws, scored = len(inputs.drawing), inputs.scored
        pooled_at = draws + len(scored.rows)
        vectors, unmasked = None, Unmasked()
        if inputs.pooled.parts:
            vectors = self._pooler.take(states[pooled_at:], inputs.pooled.parts)
        if draws and drawn is None:
            logits, masks = self._model.logits(states[:draws]), None
            if pending is not None:
                masks, unmasked = pending.uploaded()
            drawn = self._sampler.sample(logits, inputs.draws, masks)
        scores = self._score(states[draws:pooled_at], inputs) if scored.rows else None
        pooling = inputs.pooled.chunks
        launched = Launched(
            plan.chunks, inputs.drawing, drawn, unmasked, pooling, vectors, scored, scores
        )
        return launched if self._copier is None else self._copier.begin(launched)

    def collect(self, launched: Launched) -> tuple[Result, ...]:
        """Wait for a step; its results, aligned with its chunks. Only this method waits."""
        return outcomes(launched) if self._copier is None else self._copier.finish(launched)

    def warm_up(
        self, images: ImageLimits | None = None, *, workspace_bytes: int | None = None
    ) -> None:
        """Run the largest step before any other, so that a lack of memory is found at start.

        Then run the others of `scratch_steps`, which may use other kernels: where these are
        compiled at first use, all that serving uses. `images`: limits of the images that rows of
        the largest step may belong to. `workspace_bytes`: memory of the largest step, for devices
        that free the memory of each step and use the same kernels for all sizes: this much is
        allocated and freed instead, and only the smallest step is run.
        """
        assert self._fresh, "warm_up runs before the first step"
        limits = self._limits
        if images is not None and not any(kind.by_image for kind in self._kinds):
            row = torch.zeros(1, images.width, dtype=images.dtype, device=self._device)
            self._scratch = row.expand(limits.context_tokens, -1)
        most, span = limits.draws, 0
        if self._recorded is not None:
            most, span = self._recorded.most_rows, self._recorded.most_span_rows
        compiles = has_kernels(self._device)
        steps = [*scratch_steps(limits, most_recorded=most, most_span=span, compiles=compiles)]
        what = f"A step of {limits.step_tokens:,} tokens over {limits.slots:,} sequences"
        with must_fit(what, self._device, "`step_tokens`, `max_sequences` or `cache_tokens`"):
            if workspace_bytes is not None:
                torch.empty(workspace_bytes, dtype=torch.uint8, device=self._device)
                self._scratch, steps = None, steps[-1:]
            for step in steps:
                model = ScratchModel(
                    self._model.causal, self._model.generates, sees=self._scratch is not None
                )
                results = self.collect(self.launch(scratch_plan(step, limits, model)))
                if any(isinstance(result, DrawFailure) for result in results):
                    raise ModelFileError(f"The model cannot compute: {NOT_FINITE.reason}")
                self._scratch = None  # decode steps have no images
        self._fresh = True

    def _score(self, states: Tensor, inputs: DeviceInputs) -> TokenScores:
        """The scores of states [rows, hidden], computed in blocks of at most as many rows as may
        sample, because memory is reserved for that many logits."""
        draws = len(inputs.drawing)
        rows = inputs.output_rows[draws : draws + len(states)]
        slots, positions = inputs.row_slot[rows], inputs.positions[rows] + 1
        blocks, step = [], self._limits.draws
        for begin in range(0, len(states), step):
            block = slice(begin, begin + step)
            logits = self._model.logits(states[block])
            blocks.append(
                self._sampler.score(
                    logits, slots[block], positions[block], inputs.scored.alternatives
                )
            )
        return TokenScores.joined(blocks)

    def _prepared(self, inputs: DeviceInputs) -> Callable[[], StepOutput]:
        """A function that computes the states of `output_rows`, and perhaps draws tokens."""
        if self._recorded is not None:
            return self._recorded.prepared(inputs, self._batch, self._draw)
        batch = self._batch(inputs)
        return lambda: StepOutput(self._model.states(batch, self._pool), None)

    def _draw(self, inputs: DeviceInputs, states: Tensor) -> Drawn:
        """The tokens of rows that all draw from their logits alone."""
        return self._sampler.sample(self._model.logits(states), inputs.draws)

    def _batch(self, inputs: DeviceInputs) -> Batch:
        positions, slots = inputs.positions, inputs.row_slot
        plans, writes = [], tuple[ImageWrite, ...]()
        tables = zip(self._pool.page_tables, self._kinds, inputs.groups, strict=True)
        for table, kind, group in tables:
            seen = (table, slots, group.begin, group.end)
            if group.images is None:
                if kind.by_sequence:
                    cells = slot_entries(table, slots, None)
                else:
                    cells = slot_entries(table, slots, positions, page_tokens=self._page_tokens)
                plans.append(AttentionPlan(*seen, cells, group.seen.spans(inputs.rows)))
                continue
            cells = slot_entries(
                table, group.images.slots, group.images.indices, page_tokens=self._page_tokens
            )
            writes, after = group.images.writes, group.images.after_image
            plans.append(AttentionPlan(*seen, cells, group.seen.spans(inputs.rows), writes, after))
        return Batch(
            self._sampler.tokens_at(slots, positions),
            positions,
            inputs.output_rows,
            tuple(plans),
            tuple(self._features(write.digest)[: write.end - write.begin] for write in writes),
            inputs.image_rows if inputs.images else None,
            self._inserted(inputs.images) if inputs.images else None,
            inputs.axes,
        )

    def _inserted(self, parts: tuple[FeatureRows, ...]) -> Tensor:
        """[image rows, width]."""
        return torch.cat([self._features(part.digest)[part.begin : part.end] for part in parts])

    def _features(self, digest: bytes) -> Tensor:
        if self._scratch is not None:
            return self._scratch
        assert self._image_features is not None, "the engine has no image features"
        features = self._image_features(digest)
        if features.is_cuda:  # the features may be evicted before this step has read them
            features.record_stream(torch.cuda.current_stream(self._device))
        return features


@contextmanager
def must_fit(what: str, device: torch.device, settings: str) -> Iterator[None]:
    """Raises DoesNotFitError, which advises to lower `settings`, if there is too little memory for
    `what`, such as "The largest image". torch reports that by a type on CUDA, by a message on a
    CPU."""
    try:
        yield
    except (RuntimeError, MemoryError) as error:
        named = isinstance(error, torch.OutOfMemoryError | MemoryError)
        if not named and "can't allocate memory" not in str(error):
            raise
        raise DoesNotFitError(
            f"{what} exceeds the memory left on {device}: {error} Lower {settings}."
        ) from error
