"""Builds an engine from a decoder; reserves all of its memory or raises DoesNotFitError."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

import torch

from runtime.distributed.broadcaster import (
    RankZeroModel,
    RankZeroPool,
    RankZeroRunner,
    follow,
)
from runtime.distributed.device_memory import plan_memory_per_device
from runtime.distributed.rank_group import Member, RankGroup
from runtime.engine.async_engine import AsyncEngine
from runtime.engine.draft_assembly import DraftPlan
from runtime.engine.draft_proposals import DraftProposals
from runtime.engine.drafter import Drafter
from runtime.engine.engine import Engine, EngineLimits
from runtime.engine.engine_options import EngineOptions, check_options
from runtime.engine.gated_runner import GatedRunner
from runtime.engine.host_memory import host_page_counts, measured_host_pages
from runtime.engine.memory_plan import MemoryOptions, MemoryPlan, VisionBytes, plan_memory
from runtime.engine.ngram_proposals import NGramProposals
from runtime.engine.scheduler import Scheduler
from runtime.engine.speculation import Speculation
from runtime.engine.step_budget import StepBudget
from runtime.engine.step_plan import Runner
from runtime.engine.tracing import TraceSink
from runtime.errors import ConfigurationError
from runtime.kv.cache_layout import CacheLayout
from runtime.kv.cache_manager import KVCacheManager
from runtime.kv.cache_types import CacheType
from runtime.kv.host_store import HostPages
from runtime.kv.pool import KVPool, PagePool
from runtime.vision.encoder import EncoderNeeds, ImageEncoder
from runtime.vision.feature_cache import FeatureStore
from runtime.worker.model import DecoderModel
from runtime.worker.runner import DeviceRunner, must_fit

_CACHED_IMAGES = 4  # of the largest size, by default


def assemble(
    decoder: DecoderModel,
    token_bytes: Callable[[int], bytes],
    *,
    device: torch.device,
    options: EngineOptions,
    encoder: ImageEncoder | None = None,
    rank_group: RankGroup | None = None,
    trace_sink: TraceSink | None = None,
    draft: DecoderModel | None = None,
) -> tuple[AsyncEngine, MemoryPlan]:
    """An engine that is ready to start, and the memory that it has reserved.

    `encoder`: computes image features; closed with the engine. `rank_group`: the ranks, if
    `decoder` is rank 0's part of a divided model; the others call `compute_part` and end with the
    engine. `trace_sink`: receives the events of traced requests. `draft`: a smaller model of the
    same vocabulary, which proposes tokens; not with `rank_group`. Raises DoesNotFitError when the
    device has too little memory, ConfigurationError when the options contradict each other or the
    model.
    """
    assert rank_group is None or draft is None, "the other ranks have no draft model"
    build = _resolved(decoder, device, options, encoder, rank_group)
    options, layout = build.options, build.layout
    draft_plan = build.draft_plan(draft)
    memory, host = _agreed_memory(build, rank_group, draft_plan)
    features = _feature_store(encoder, options)
    pool = build.pool(memory, host)
    model, pages = _broadcasting(decoder, pool, rank_group)
    runner = DeviceRunner(
        model,
        pages,
        layout,
        options.limits,
        device=device,
        image_features=features.lookup if features else None,
        recorded_bytes=0 if rank_group else memory.recorded_bytes,  # ranks exchange tensors
    )
    _warm_up(runner, encoder, memory, device, alone=rank_group is None)
    host_costs, budget = build.host_costs(host, pool), _step_budget(options)
    drafter = draft_plan.build(memory, budget) if draft_plan else None
    engine = Engine(
        build.scheduler(memory, host_costs, drafter, budget),
        _stepping(runner, encoder, rank_group),
        token_bytes=token_bytes,
        limits=build.request_limits(),
        depth=build.depth,
        features=features,
        trace_sink=trace_sink,
    )
    return AsyncEngine(engine, peers=rank_group), memory


def plan_engine_memory(
    decoder: DecoderModel,
    *,
    device: torch.device,
    options: EngineOptions,
    encoder: EncoderNeeds | None = None,
    draft: DecoderModel | None = None,
) -> MemoryPlan:
    """What `assemble` would reserve; raises the same errors."""
    build = _resolved(decoder, device, options, encoder, None)
    return build.plan_memory(build.draft_plan(draft))


def compute_part(decoder: DecoderModel, member: Member, *, device: torch.device) -> None:
    """Compute the part of a rank other than 0 in every step, until rank 0 ends."""
    received = member.control_channel.receive_json()
    options = _options_of(received["options"])
    layout = CacheLayout.of(decoder.cache_layers, page_tokens=options.page_tokens)
    build = _Build(decoder, layout, device, options, device_ranks=member.device_ranks)
    memory = member.agree(build.plan_memory(), layout, options.kv_dtype)
    pool = build.pool(memory, received["host_pages"])
    follow(decoder, pool, member.control_channel, member.ranks, device)


def _agreed_memory(
    build: "_Build", rank_group: RankGroup | None, draft: DraftPlan | None
) -> tuple[MemoryPlan, tuple[int, ...]]:
    """The memory plan of this rank, and the number of host pages of each cache group, which is the
    same on all ranks."""
    options, layout = build.options, build.layout
    memory = build.plan_memory(draft)
    host = host_page_counts(
        layout,
        memory.pages,
        options.kv_dtype,
        device=build.device,
        budget_bytes=options.host_cache_bytes if options.prefix_cache else 0,
        machine_ranks=1 if rank_group is None else rank_group.machine_ranks,
    )
    if rank_group is not None:
        sent = {"options": _sent_options(options), "host_pages": host}
        memory = rank_group.agree(memory, layout, options.kv_dtype, sent)
    return memory, host


def _sent_options(options: EngineOptions) -> dict[str, Any]:
    """As JSON, for `_options_of` on other ranks."""
    return {**asdict(options), "kv_dtype": options.kv_dtype.value}


def _options_of(received: Mapping[str, Any]) -> EngineOptions:
    return EngineOptions(**{**received, "kv_dtype": CacheType(received["kv_dtype"])})


def _broadcasting(
    decoder: DecoderModel, pool: KVPool, rank_group: RankGroup | None
) -> tuple[DecoderModel, PagePool]:
    """Wraps model and pool so that the other ranks, if any, execute each step too."""
    if rank_group is None:
        return decoder, pool
    broadcaster = rank_group.broadcaster
    return RankZeroModel(decoder, broadcaster), RankZeroPool(pool, broadcaster)


def _stepping(runner: Runner, encoder: ImageEncoder | None, rank_group: RankGroup | None) -> Runner:
    """The runner as the engine calls it, beside image encoding and other ranks, if any."""
    if encoder is not None and encoder.gate is not None:
        runner = GatedRunner(runner, encoder.gate)
    return runner if rank_group is None else RankZeroRunner(runner, rank_group.check)


def _resolved(
    decoder: DecoderModel,
    device: torch.device,
    options: EngineOptions,
    encoder: EncoderNeeds | None,
    rank_group: RankGroup | None,
) -> "_Build":
    """With images, the options have no None for their cache; without graphs where they cannot be.
    States of recurrent layers cannot be taken back, so there is no speculation with them."""
    check_options(options, decoder)
    layout = CacheLayout.of(decoder.cache_layers, page_tokens=options.page_tokens)
    if any(kind.by_sequence for kind in layout.kinds) or not decoder.generates:
        options = replace(options, proposed_tokens=0)
    if encoder is not None:
        options = _options_for_images(options, layout, encoder)
    # Ranks take part in a step by messages, with inputs at new addresses each time, and sum by NCCL
    # within it: where the capture of one fails, the others would wait for it in their sums.
    graphs = options.cuda_graphs and rank_group is None and decoder.cache_devices is None
    options = replace(options, cuda_graphs=graphs)
    device_ranks = 1 if rank_group is None else rank_group.device_ranks
    return _Build(decoder, layout, device, options, encoder, device_ranks)


def _options_for_images(
    options: EngineOptions, layout: CacheLayout, encoder: EncoderNeeds
) -> EngineOptions:
    """`step_tokens` for the longest whole image beside a row of every other sequence, or one of
    them with its proposals (`StepLimits.draws`); `image_cache_bytes` for the features that one
    sequence may need at once."""
    limits = encoder.limits
    others = max(options.max_sequences - 1, options.proposed_tokens)
    whole = limits.whole + others if limits.whole else 0
    largest = limits.rows * limits.row_bytes
    least = largest * (layout.most_images or 1)
    kept = options.image_cache_bytes
    if kept is not None and kept < least:
        raise ConfigurationError(
            f"`image_cache_bytes` is {kept:,}; the features that a single request of this model "
            f"may need at once take {least:,}."
        )
    return replace(
        options,
        step_tokens=max(options.step_tokens, whole),
        image_cache_bytes=max(least, _CACHED_IMAGES * largest) if kept is None else kept,
    )


def _feature_store(encoder: ImageEncoder | None, options: EngineOptions) -> FeatureStore | None:
    if encoder is None:
        return None
    assert options.image_cache_bytes is not None
    return FeatureStore(encoder, budget_bytes=options.image_cache_bytes)


def _warm_up(
    runner: DeviceRunner,
    encoder: ImageEncoder | None,
    memory: MemoryPlan,
    device: torch.device,
    *,
    alone: bool,
) -> None:
    """Other ranks check no plan before they compute, so they compute the largest step too."""
    planned = memory.step_bytes if device.type == "cpu" and alone else None
    runner.warm_up(encoder.limits if encoder else None, workspace_bytes=planned)
    if encoder is not None:
        settings = "`cache_tokens`, `image_cache_bytes` or `max_sequences`"
        with must_fit("The largest image", device, settings):
            encoder.warm_up()


@dataclass(frozen=True, slots=True)
class _Build:
    """A decoder and the options of `_resolved`, and the parts of an engine that follow from them.

    `device_ranks`: ranks, this one included, that allocate from the device's memory.
    """

    decoder: DecoderModel
    layout: CacheLayout
    device: torch.device
    options: EngineOptions
    encoder: EncoderNeeds | None = None
    device_ranks: int = 1

    @property
    def depth(self) -> int:
        return self.options.depth or (1 if self.device.type == "cpu" else 2)

    def plan_memory(self, draft: DraftPlan | None = None) -> MemoryPlan:
        options, decoder = self.options, self.decoder
        plan = plan_memory if decoder.cache_devices is None else plan_memory_per_device
        host_bytes = self.device_ranks * self._host_bytes()
        checkpoint_bytes = options.state_checkpoint_bytes if options.prefix_cache else 0
        return plan(
            decoder,
            self.layout,
            self.device,
            MemoryOptions(
                limits=options.limits,
                kv_dtype=options.kv_dtype,
                cache_tokens=options.cache_tokens,
                memory_bytes=options.memory_bytes,
                depth=self.depth,
                vision=self._vision_bytes(),
                cuda_graphs=options.cuda_graphs,
                device_ranks=self.device_ranks,
                set_aside_bytes=options.set_aside_bytes + host_bytes,
                state_checkpoint_bytes=checkpoint_bytes,
                draft=draft,
            ),
        )

    def _host_bytes(self) -> int:
        """The part of the device's memory that the host's pages of one rank take."""
        unused = self.device.type == "cuda" or not self.options.prefix_cache
        return 0 if unused else self.options.host_cache_bytes or 0

    def _vision_bytes(self) -> VisionBytes:
        """The workspace also holds a step's rows of features, gathered and converted to float32."""
        options, encoder = self.options, self.encoder
        if encoder is None:
            return VisionBytes()
        assert options.image_cache_bytes is not None
        gathered = options.step_tokens * (encoder.limits.row_bytes + 4 * encoder.limits.width)
        return VisionBytes(
            encoder.weight_bytes, encoder.workspace_bytes + options.image_cache_bytes + gathered
        )

    def draft_plan(self, draft: DecoderModel | None) -> DraftPlan | None:
        if draft is None:
            return None
        device, options = self.device, self.options
        return DraftPlan(draft, self.decoder, device=device, options=options, depth=self.depth)

    def pool(self, memory: MemoryPlan, host_pages: Sequence[int]) -> KVPool:
        options = self.options
        return KVPool(
            self.layout,
            pages=memory.pages,
            slots=options.max_sequences + 1,  # the last one is that of padding
            pages_per_sequence=-(-options.context_tokens // options.page_tokens),
            type=options.kv_dtype,
            device=self.device,
            host_pages=host_pages,
            workspace_bytes=memory.activation_bytes - memory.recorded_bytes,
            decoder=self.decoder,
        )

    def host_costs(self, counts: Sequence[int], pool: KVPool) -> HostPages | None:
        if not any(counts):
            return None
        type, device = self.options.kv_dtype, self.device
        return measured_host_pages(self.layout, counts, type, pool=pool, device=device)

    def request_limits(self) -> EngineLimits:
        options = self.options
        return EngineLimits(
            options.context_tokens,
            self.decoder.vocab_size,
            max_live=options.max_sequences + options.max_waiting,
            most_images=self.layout.most_images,
            image_rows=self.encoder.limits.rows if self.encoder else 0,
            step_tokens=options.step_tokens,
            slots=options.max_sequences,
        )

    def scheduler(
        self,
        memory: MemoryPlan,
        host_pages: HostPages | None,
        drafter: Drafter | None,
        budget: StepBudget | None,
    ) -> Scheduler:
        options = self.options
        cache_manager = KVCacheManager(
            self.layout.kinds,
            memory.pages,
            page_tokens=options.page_tokens,
            prefix_cache=options.prefix_cache,
            host_pages=host_pages,
            moves_keys=self.decoder.key_rotations is not None,
        )
        return Scheduler(
            cache_manager,
            slots=options.max_sequences,
            step_tokens=options.step_tokens,
            step_image_rows=self.layout.image_rows,
            speculation=self._speculation(drafter),
            step_budget=budget,
        )

    def _speculation(self, drafter: Drafter | None) -> Speculation | None:
        options = self.options
        most = min(options.proposed_tokens, options.limits.draws - 1)
        if most < 1 or not (options.ngram or drafter):
            return None
        return Speculation(
            draws=options.limits.draws,
            overlaps=self.depth > 1,
            ngram=NGramProposals(most=most) if options.ngram else None,
            drafts=DraftProposals(drafter, most=most) if drafter else None,
        )


def _step_budget(options: EngineOptions) -> StepBudget | None:
    if options.target_gap_ms is None:
        return None
    return StepBudget(int(1e6 * options.target_gap_ms), step_tokens=options.step_tokens)
