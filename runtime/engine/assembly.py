"""Builds an engine from a decoder; reserves all of its memory or raises DoesNotFitError."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
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
from runtime.engine.draft_assembly import DraftOptions, DraftPlan
from runtime.engine.draft_proposals import DraftProposals
from runtime.engine.drafter import Drafter
from runtime.engine.engine import Engine, EngineLimits
from runtime.engine.gated_runner import GatedRunner
from runtime.engine.host_memory import host_page_counts, measured_host_pages
from runtime.engine.memory_plan import MemoryOptions, MemoryPlan, VisionBytes, plan_memory
from runtime.engine.ngram_proposals import NGramProposals
from runtime.engine.scheduler import Scheduler
from runtime.engine.speculation import Speculation
from runtime.engine.step_budget import StepBudget
from runtime.engine.step_plan import Runner
from runtime.engine.tracing import TraceSink
from runtime.errors import ConfigurationError, DoesNotFitError
from runtime.kv.cache_manager import KVCacheManager
from runtime.kv.cache_types import CacheType
from runtime.kv.host_store import HostPages
from runtime.kv.pool import KVPool, PagePool
from runtime.kv.spec import CacheLayout
from runtime.vision.encoder import EncoderNeeds, ImageEncoder
from runtime.vision.feature_cache import FeatureStore
from runtime.worker.input_preparer import StepLimits
from runtime.worker.model import DecoderModel
from runtime.worker.runner import DeviceRunner, is_lack_of_memory

_CACHED_IMAGES = 4  # of the largest size, by default


@dataclass(frozen=True, slots=True)
class EngineOptions:
    """The sizes of an engine.

    `step_tokens`: rows of one step at most. `cache_tokens`: positions that the cache holds in total
    (None: as many as are useful and fit). `depth`: steps in flight (None: 1 on a CPU, where a
    launch computes at once, else 2). `memory_bytes`: what the engine may use (None: what is free).
    `image_cache_bytes`: for image features (None: for a few images of the largest size).
    `set_aside_bytes`: part of the free memory that is left to others. `state_checkpoint_bytes`: for
    checkpoints of recurrent states (None: a share of the cache's memory). `host_cache_bytes`: host
    memory for pages that the prefix cache evicts (None: see `host_page_counts`). `proposed_tokens`:
    speculation proposes at most this many tokens per sequence and step (0: no speculation);
    `ngram`: by prompt lookup too, not only by a draft model. `cuda_graphs`: decode steps on a CUDA
    device are captured (`step_graphs`), unless several devices or ranks compute the model.
    `target_gap_ms`: see `StepBudget` (None: prompts fill steps).
    """

    context_tokens: int
    max_sequences: int = 16
    step_tokens: int = 512
    cache_tokens: int | None = None
    page_tokens: int = 16
    kv_dtype: CacheType = CacheType.FLOAT32
    prefix_cache: bool = True
    depth: int | None = None
    memory_bytes: int | None = None
    max_waiting: int = 512
    image_cache_bytes: int | None = None
    set_aside_bytes: int = 0
    state_checkpoint_bytes: int | None = None
    host_cache_bytes: int | None = None
    proposed_tokens: int = 0
    cuda_graphs: bool = False
    target_gap_ms: float | None = None
    ngram: bool = True

    @property
    def limits(self) -> StepLimits:
        return StepLimits(
            self.max_sequences, self.step_tokens, self.context_tokens, self.proposed_tokens
        )


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
    layout, options = _resolved(decoder, device, options, encoder, alone=rank_group is None)
    draft_plan = _draft_plan(decoder, draft, device, options, rank_group)
    memory, host = _agreed_memory(decoder, layout, device, options, encoder, rank_group, draft_plan)
    features = _feature_store(encoder, options)
    pool = _pool(layout, memory, device, options, decoder, host_pages=host)
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
    costs = _host_costs(layout, host, pool, device, options)
    budget = _step_budget(options)
    drafter = draft_plan.build(memory, budget) if draft_plan else None
    scheduler = _scheduler(decoder, layout, memory, options, costs, drafter, budget)
    engine = Engine(
        scheduler,
        _stepping(runner, encoder, rank_group),
        token_bytes=token_bytes,
        limits=_request_limits(decoder, layout, options, encoder),
        depth=_depth(options, device),
        features=features,
        trace_sink=trace_sink,
    )
    return AsyncEngine(engine, peers=rank_group), memory


def _agreed_memory(
    decoder: DecoderModel,
    layout: CacheLayout,
    device: torch.device,
    options: EngineOptions,
    encoder: ImageEncoder | None,
    rank_group: RankGroup | None,
    draft: DraftPlan | None,
) -> tuple[MemoryPlan, tuple[int, ...]]:
    """The memory plan of this rank, and the number of host pages of each cache group, which is the
    same on all ranks."""
    device_ranks = 1 if rank_group is None else rank_group.device_ranks
    memory = _plan_memory(
        decoder, layout, device, options, encoder, device_ranks=device_ranks, draft=draft
    )
    host = host_page_counts(
        layout,
        memory.pages,
        options.kv_dtype,
        device=device,
        budget_bytes=options.host_cache_bytes if options.prefix_cache else 0,
        machine_ranks=1 if rank_group is None else rank_group.machine_ranks,
    )
    if rank_group is not None:
        sent = _rank_options(options, host)
        memory = rank_group.agree(memory, layout, options.kv_dtype, sent)
    return memory, host


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


def plan_engine_memory(
    decoder: DecoderModel,
    *,
    device: torch.device,
    options: EngineOptions,
    encoder: EncoderNeeds | None = None,
    draft: DecoderModel | None = None,
) -> MemoryPlan:
    """What `assemble` would reserve; raises the same errors."""
    layout, options = _resolved(decoder, device, options, encoder)
    draft_plan = _draft_plan(decoder, draft, device, options, None)
    return _plan_memory(decoder, layout, device, options, encoder, draft=draft_plan)


def compute_part(decoder: DecoderModel, member: Member, *, device: torch.device) -> None:
    """Compute the part of a rank other than 0 in every step, until rank 0 ends."""
    received = member.control_channel.receive_json()
    host_pages = received.pop("host_pages")
    options = _options_of(received)
    layout = CacheLayout.of(decoder.cache_layers, page_tokens=options.page_tokens)
    memory = _plan_memory(decoder, layout, device, options, None, device_ranks=member.device_ranks)
    memory = member.agree(memory, layout, options.kv_dtype)
    pool = _pool(layout, memory, device, options, decoder, host_pages=host_pages)
    follow(decoder, pool, member.control_channel, member.ranks, device)


def _resolved(
    decoder: DecoderModel,
    device: torch.device,
    options: EngineOptions,
    encoder: EncoderNeeds | None,
    *,
    alone: bool = True,
) -> tuple[CacheLayout, EngineOptions]:
    """The cache layout, and the options without None for `depth` and, with images, for their
    cache, and without graphs where they cannot be. States of recurrent layers cannot be taken back,
    so there is no speculation with them. `alone`: without other ranks."""
    check_options(options, decoder)
    layout = CacheLayout.of(decoder.cache_layers, page_tokens=options.page_tokens)
    if any(kind.by_sequence for kind in layout.kinds) or not decoder.generates:
        options = replace(options, proposed_tokens=0)
    if encoder is not None:
        options = _options_for_images(options, layout, encoder)
    # Ranks take part in a step by messages, with inputs at new addresses each time, and sum by NCCL
    # within it: where the capture of one fails, the others would wait for it in their sums.
    graphs = options.cuda_graphs and alone and decoder.cache_devices is None
    return layout, replace(options, depth=_depth(options, device), cuda_graphs=graphs)


def _depth(options: EngineOptions, device: torch.device) -> int:
    return options.depth or (1 if device.type == "cpu" else 2)


def _rank_options(options: EngineOptions, host_pages: Sequence[int]) -> dict[str, Any]:
    """The options that other ranks need, as JSON; see `_options_of` and `compute_part`."""
    sizes = ("context_tokens", "max_sequences", "step_tokens", "cache_tokens", "page_tokens")
    memories = ("memory_bytes", "set_aside_bytes", "host_cache_bytes", "state_checkpoint_bytes")
    others = ("depth", "prefix_cache", "proposed_tokens")
    plain = {name: getattr(options, name) for name in (*sizes, *memories, *others)}
    return {**plain, "kv_dtype": options.kv_dtype.value, "host_pages": list(host_pages)}


def _options_of(received: Mapping[str, Any]) -> EngineOptions:
    return EngineOptions(**{**received, "kv_dtype": CacheType(received["kv_dtype"])})


def _plan_memory(
    decoder: DecoderModel,
    layout: CacheLayout,
    device: torch.device,
    options: EngineOptions,
    encoder: EncoderNeeds | None,
    *,
    device_ranks: int = 1,
    draft: DraftPlan | None = None,
) -> MemoryPlan:
    """`device_ranks`: ranks, this one included, that allocate from the device's memory."""
    plan = plan_memory if decoder.cache_devices is None else plan_memory_per_device
    return plan(
        decoder,
        layout,
        device,
        MemoryOptions(
            limits=options.limits,
            kv_dtype=options.kv_dtype,
            cache_tokens=options.cache_tokens,
            memory_bytes=options.memory_bytes,
            depth=_depth(options, device),
            vision=_vision_bytes(options, encoder),
            cuda_graphs=options.cuda_graphs,
            device_ranks=device_ranks,
            set_aside_bytes=options.set_aside_bytes + device_ranks * _host_bytes(options, device),
            state_checkpoint_bytes=options.state_checkpoint_bytes if options.prefix_cache else 0,
            draft=draft,
        ),
    )


def _draft_plan(
    decoder: DecoderModel,
    draft: DecoderModel | None,
    device: torch.device,
    options: EngineOptions,
    rank_group: RankGroup | None,
) -> DraftPlan | None:
    """`options`: those of `_resolved`."""
    if draft is None:
        return None
    assert rank_group is None, "the other ranks have no draft model"
    shared = DraftOptions(
        limits=options.limits,
        page_tokens=options.page_tokens,
        kv_dtype=options.kv_dtype,
        prefix_cache=options.prefix_cache,
        depth=_depth(options, device),
        cuda_graphs=options.cuda_graphs,
    )
    return DraftPlan(draft, decoder, device=device, options=shared)


def _host_bytes(options: EngineOptions, device: torch.device) -> int:
    """The part of the device's memory that the host's pages of one rank take."""
    unused = device.type == "cuda" or not options.prefix_cache
    return 0 if unused else options.host_cache_bytes or 0


def _host_costs(
    layout: CacheLayout,
    counts: Sequence[int],
    pool: KVPool,
    device: torch.device,
    options: EngineOptions,
) -> HostPages | None:
    if not any(counts):
        return None
    return measured_host_pages(layout, counts, options.kv_dtype, pool=pool, device=device)


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
    if encoder is None:
        return
    try:
        encoder.warm_up()
    except (RuntimeError, MemoryError) as error:
        if not is_lack_of_memory(error):
            raise
        raise DoesNotFitError(
            f"The largest image does not fit in the memory left on {device}: {error} Lower "
            "`cache_tokens`, `image_cache_bytes` or `max_sequences`."
        ) from error


def _vision_bytes(options: EngineOptions, encoder: EncoderNeeds | None) -> VisionBytes:
    """The workspace also holds a step's rows of features, gathered and converted to float32."""
    if encoder is None:
        return VisionBytes()
    assert options.image_cache_bytes is not None
    limits = encoder.limits
    gathered = options.step_tokens * (limits.row_bytes + 4 * limits.width)
    return VisionBytes(
        encoder.weight_bytes, encoder.workspace_bytes + options.image_cache_bytes + gathered
    )


def _request_limits(
    decoder: DecoderModel,
    layout: CacheLayout,
    options: EngineOptions,
    encoder: ImageEncoder | None,
) -> EngineLimits:
    return EngineLimits(
        options.context_tokens,
        decoder.vocab_size,
        max_live=options.max_sequences + options.max_waiting,
        most_images=layout.most_images,
        image_rows=encoder.limits.rows if encoder else 0,
        step_tokens=options.step_tokens,
        slots=options.max_sequences,
    )


def _scheduler(
    decoder: DecoderModel,
    layout: CacheLayout,
    memory: MemoryPlan,
    options: EngineOptions,
    host_pages: HostPages | None,
    drafter: Drafter | None,
    budget: StepBudget | None,
) -> Scheduler:
    cache_manager = KVCacheManager(
        layout.kinds,
        memory.pages,
        page_tokens=options.page_tokens,
        prefix_cache=options.prefix_cache,
        host_pages=host_pages,
        moves_keys=decoder.key_rotations is not None,
    )
    return Scheduler(
        cache_manager,
        slots=options.max_sequences,
        step_tokens=options.step_tokens,
        step_image_rows=layout.image_rows,
        speculation=_speculation(options, drafter),
        step_budget=budget,
    )


def _step_budget(options: EngineOptions) -> StepBudget | None:
    if options.target_gap_ms is None:
        return None
    return StepBudget(int(1e6 * options.target_gap_ms), step_tokens=options.step_tokens)


def _speculation(options: EngineOptions, drafter: Drafter | None) -> Speculation | None:
    most = min(options.proposed_tokens, options.limits.draws - 1)
    if most < 1 or not (options.ngram or drafter):
        return None
    return Speculation(
        draws=options.limits.draws,
        overlaps=options.depth is None or options.depth > 1,
        ngram=NGramProposals(most=most) if options.ngram else None,
        drafts=DraftProposals(drafter, most=most) if drafter else None,
    )


def _pool(
    layout: CacheLayout,
    memory: MemoryPlan,
    device: torch.device,
    options: EngineOptions,
    decoder: DecoderModel,
    *,
    host_pages: Sequence[int],
) -> KVPool:
    return KVPool(
        layout,
        pages=memory.pages,
        slots=options.max_sequences + 1,  # the last one is that of padding
        pages_per_sequence=-(-options.context_tokens // options.page_tokens),
        type=options.kv_dtype,
        device=device,
        host_pages=host_pages,
        workspace_bytes=memory.activation_bytes - memory.recorded_bytes,
        decoder=decoder,
    )


def check_options(options: EngineOptions, decoder: DecoderModel) -> None:
    """Raises ConfigurationError when the options contradict each other or the model."""
    if options.context_tokens > decoder.context_length:
        raise ConfigurationError(
            f"`context_tokens` is {options.context_tokens:,}; "
            f"the model supports {decoder.context_length:,} at most."
        )
    if options.context_tokens < 2 or options.max_sequences < 1:
        raise ConfigurationError("`context_tokens` must be 2 or more, `max_sequences` 1 or more.")
    if options.cache_tokens is not None and options.cache_tokens < options.context_tokens:
        raise ConfigurationError(
            f"`cache_tokens` is {options.cache_tokens:,}, less than one context of "
            f"{options.context_tokens:,} tokens. Raise it, or lower `context_tokens`."
        )
    if options.step_tokens < options.max_sequences:
        raise ConfigurationError(
            f"`step_tokens` ({options.step_tokens:,}) must be at least `max_sequences` "
            f"({options.max_sequences:,}): each running sequence needs one row of a step."
        )
    for cache in decoder.cache_layers:
        if cache.kind.alignment % options.page_tokens:
            raise ConfigurationError(
                f"`page_tokens` is {options.page_tokens:,}; "
                f"for this model it must divide {cache.kind.alignment:,}."
            )
