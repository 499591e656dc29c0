"""From a decoder to a ready engine: everything is reserved here, or refused."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch

from runtime.distributed.broadcaster import LeadingModel, LeadingPool, follow
from runtime.distributed.rank_group import Member, RankGroup
from runtime.distributed.stage_memory import plan_layer_placement
from runtime.engine.async_engine import AsyncEngine
from runtime.engine.engine import Engine, EngineLimits
from runtime.engine.memory_plan import MemoryPlan, VisionBytes, plan_memory
from runtime.engine.scheduler import Scheduler
from runtime.errors import ConfigurationError, DoesNotFitError
from runtime.kv.cache_manager import KVCacheManager
from runtime.kv.pool import KVPool, PagePool
from runtime.kv.spec import CacheLayout
from runtime.vision.encoder import EncoderNeeds, ImageEncoder
from runtime.vision.feature_cache import FeatureStore
from runtime.worker.model import DecoderModel
from runtime.worker.runner import DeviceRunner, is_lack_of_memory

_IMAGES_KEPT = 4  # of the largest, by default


@dataclass(frozen=True, slots=True)
class EngineOptions:
    """How an engine is laid out.

    `step_tokens`: rows of one step at most. `cache_tokens`: positions the cache holds in all
    (None: as many as useful and free). `depth`: steps in flight (None: 1 on the CPU, where a
    launch computes at once, else 2). `memory_bytes`: what the engine may use (None: what is free).
    `image_cache_bytes`: for features of images (None: for a few of the largest).
    `set_aside_bytes`: of what is free, what others than the engine may take.
    """

    context_tokens: int
    max_sequences: int = 16
    step_tokens: int = 512
    cache_tokens: int | None = None
    page_tokens: int = 16
    kv_dtype: torch.dtype = torch.float32
    prefix_cache: bool = True
    depth: int | None = None
    memory_bytes: int | None = None
    max_waiting: int = 512
    image_cache_bytes: int | None = None
    set_aside_bytes: int = 0


def assemble(
    decoder: DecoderModel,
    token_bytes: Callable[[int], bytes],
    *,
    device: torch.device,
    options: EngineOptions,
    encoder: ImageEncoder | None = None,
    rank_group: RankGroup | None = None,
) -> tuple[AsyncEngine, MemoryPlan]:
    """An engine that only needs `start`, and what it reserved.

    `encoder`: gives the features of images; closed with the engine. `rank_group`: the
    ranks of which the decoder is the first one's part; they run `compute_part`, and end with the
    engine. Raises
    DoesNotFitError when the device has too little memory, ConfigurationError when the options
    contradict each other or the model.
    """
    check_options(options, decoder)
    layout = CacheLayout.of(decoder.cache_layers, page_tokens=options.page_tokens)
    if encoder is not None:
        options = _options_for_images(options, layout, encoder)
    depth = options.depth or (1 if device.type == "cpu" else 2)
    sharers = 1 if rank_group is None else rank_group.device_ranks
    vision = _vision_bytes(options, encoder)
    memory = _planned(decoder, layout, device, options, depth, vision, sharers=sharers)
    if rank_group is not None:
        memory = rank_group.agree(memory, layout, options.kv_dtype, _told(options, depth))
    features = _features(options, encoder)
    runner = _runner(decoder, layout, memory, device, options, features, rank_group)
    runner.warm_up(encoder.limits if encoder else None)
    if encoder is not None:
        _warm_up(encoder, device)
    scheduler = _scheduler(layout, memory, options)
    limits = EngineLimits(
        options.context_tokens,
        decoder.vocab_size,
        max_live=options.max_sequences + options.max_waiting,
        most_images=layout.most_images,
        image_rows=encoder.limits.rows if encoder else 0,
        step_tokens=options.step_tokens,
        slots=options.max_sequences,
    )
    engine = Engine(
        scheduler, runner, token_bytes=token_bytes, limits=limits, depth=depth, features=features
    )
    return AsyncEngine(engine, peers=rank_group), memory


def foresee(
    decoder: DecoderModel,
    *,
    device: torch.device,
    options: EngineOptions,
    encoder: EncoderNeeds | None = None,
) -> MemoryPlan:
    """What `assemble` would reserve; raises as it does."""
    check_options(options, decoder)
    layout = CacheLayout.of(decoder.cache_layers, page_tokens=options.page_tokens)
    if encoder is not None:
        options = _options_for_images(options, layout, encoder)
    depth = options.depth or (1 if device.type == "cpu" else 2)
    return _planned(decoder, layout, device, options, depth, _vision_bytes(options, encoder))


def compute_part(decoder: DecoderModel, member: Member, *, device: torch.device) -> None:
    """Another rank's part of everything that the first one's engine computes, until that ends."""
    told = member.control_channel.received_words()
    depth, dtype = told.pop("depth"), getattr(torch, told.pop("kv_dtype"))
    options = EngineOptions(**told, kv_dtype=dtype)
    layout = CacheLayout.of(decoder.cache_layers, page_tokens=options.page_tokens)
    sharers = member.device_ranks
    memory = _planned(decoder, layout, device, options, depth, VisionBytes(), sharers=sharers)
    pool = _pool(layout, member.agree(memory, layout, dtype), device, options)
    follow(decoder, pool, member.control_channel, member.ranks, device)


def _told(options: EngineOptions, depth: int) -> dict[str, Any]:
    """What other ranks have to know of an engine."""
    names = ("context_tokens", "max_sequences", "step_tokens", "cache_tokens", "page_tokens")
    plain = {name: getattr(options, name) for name in (*names, "memory_bytes")}
    kv_dtype = str(options.kv_dtype).removeprefix("torch.")
    return {**plain, "depth": depth, "kv_dtype": kv_dtype}


def _planned(
    decoder: DecoderModel,
    layout: CacheLayout,
    device: torch.device,
    options: EngineOptions,
    depth: int,
    vision: VisionBytes,
    *,
    sharers: int = 1,
) -> MemoryPlan:
    """`sharers`: how many ranks, this one included, allocate from the device's memory."""
    staged = decoder.cache_devices is not None
    assert not staged or sharers == 1
    alone = partial(plan_memory, sharers=sharers, set_aside_bytes=options.set_aside_bytes)
    plan = plan_layer_placement if staged else alone
    return plan(
        decoder,
        layout,
        device=device,
        kv_dtype=options.kv_dtype,
        slots=options.max_sequences,
        step_tokens=options.step_tokens,
        context_tokens=options.context_tokens,
        cache_tokens=options.cache_tokens,
        memory_bytes=options.memory_bytes,
        depth=depth,
        vision=vision,
    )


def _options_for_images(
    options: EngineOptions, layout: CacheLayout, encoder: EncoderNeeds
) -> EngineOptions:
    """Steps that hold the longest whole image beside a row of every other sequence, and room for
    the features that one sequence may need at once."""
    limits = encoder.limits
    whole = limits.whole + options.max_sequences - 1 if limits.whole else 0
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
        image_cache_bytes=max(least, _IMAGES_KEPT * largest) if kept is None else kept,
    )


def _warm_up(encoder: ImageEncoder, device: torch.device) -> None:
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
    """Beside the features, a step's rows of them: gathered, and as the decoder computes."""
    if encoder is None:
        return VisionBytes()
    assert options.image_cache_bytes is not None
    limits = encoder.limits
    gathered = options.step_tokens * (limits.row_bytes + 4 * limits.width)
    return VisionBytes(
        encoder.weight_bytes, encoder.workspace_bytes + options.image_cache_bytes + gathered
    )


def _features(options: EngineOptions, encoder: ImageEncoder | None) -> FeatureStore | None:
    if encoder is None:
        return None
    assert options.image_cache_bytes is not None
    return FeatureStore(encoder, budget_bytes=options.image_cache_bytes)


def _scheduler(layout: CacheLayout, memory: MemoryPlan, options: EngineOptions) -> Scheduler:
    cache_manager = KVCacheManager(
        layout.kinds,
        memory.pages,
        page_tokens=options.page_tokens,
        prefix_cache=options.prefix_cache,
    )
    return Scheduler(
        cache_manager,
        slots=options.max_sequences,
        step_tokens=options.step_tokens,
        step_image_rows=layout.image_rows,
    )


def _runner(
    decoder: DecoderModel,
    layout: CacheLayout,
    memory: MemoryPlan,
    device: torch.device,
    options: EngineOptions,
    features: FeatureStore | None,
    rank_group: RankGroup | None,
) -> DeviceRunner:
    pool: PagePool = _pool(layout, memory, device, options, decoder.cache_devices)
    if rank_group is not None:
        pool, decoder = (
            LeadingPool(pool, rank_group.broadcaster),
            LeadingModel(decoder, rank_group.broadcaster),
        )
    return DeviceRunner(
        decoder,
        pool,
        layout,
        slots=options.max_sequences,
        step_tokens=options.step_tokens,
        context_tokens=options.context_tokens,
        device=device,
        image_features=features.lookup if features else None,
    )


def _pool(
    layout: CacheLayout,
    memory: MemoryPlan,
    device: torch.device,
    options: EngineOptions,
    layer_devices: Sequence[torch.device] | None = None,
) -> KVPool:
    return KVPool(
        layout,
        pages=memory.pages,
        slots=options.max_sequences,
        pages_per_sequence=-(-options.context_tokens // options.page_tokens),
        dtype=options.kv_dtype,
        device=device,
        layer_devices=layer_devices,
    )


def check_options(options: EngineOptions, decoder: DecoderModel) -> None:
    """Raises ConfigurationError when the options contradict each other or the model."""
    if options.context_tokens > decoder.context_length:
        raise ConfigurationError(
            f"`context_tokens` is {options.context_tokens:,}; "
            f"the model was made for {decoder.context_length:,} at most."
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
