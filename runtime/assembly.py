"""From a decoder to a ready engine: everything is reserved here, or refused."""

from collections.abc import Callable
from dataclasses import dataclass

import torch

from runtime.aio import AsyncEngine
from runtime.engine import Engine, EngineLimits
from runtime.errors import ConfigurationError
from runtime.kv.ledger import PageLedger
from runtime.kv.pool import KVPool
from runtime.kv.spec import CacheLayout
from runtime.memory import MemoryPlan, plan_memory
from runtime.model import DecoderModel
from runtime.runner import DeviceRunner, ImageFeatures
from runtime.scheduler import Scheduler


@dataclass(frozen=True, slots=True)
class EngineOptions:
    """How an engine is laid out.

    `step_tokens`: rows of one step at most. `cache_tokens`: positions the cache holds in all
    (None: as many as useful and free). `depth`: steps in flight (None: 1 on the CPU, where a
    launch computes at once, else 2). `memory_bytes`: what the engine may use (None: what is free).
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


def assemble(
    decoder: DecoderModel,
    token_bytes: Callable[[int], bytes],
    *,
    device: torch.device,
    options: EngineOptions,
    image_features: ImageFeatures | None = None,
) -> tuple[AsyncEngine, MemoryPlan]:
    """An engine that only needs `start`, and what it reserved.

    `image_features`: what gives an image's rows to layers that attend to images from the side.
    Raises DoesNotFitError when the device has too little memory, ConfigurationError when the
    options contradict each other or the model.
    """
    check_options(options, decoder)
    layout = CacheLayout.of(decoder.cache_layers, page_tokens=options.page_tokens)
    depth = options.depth or (1 if device.type == "cpu" else 2)
    memory = plan_memory(
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
    )
    runner = _runner(decoder, layout, memory, device, options, image_features)
    runner.warm_up()
    scheduler = _scheduler(layout, memory, options)
    limits = EngineLimits(
        options.context_tokens,
        decoder.vocab_size,
        max_live=options.max_sequences + options.max_waiting,
        most_images=layout.most_images,
    )
    engine = Engine(scheduler, runner, token_bytes=token_bytes, limits=limits, depth=depth)
    return AsyncEngine(engine), memory


def _scheduler(layout: CacheLayout, memory: MemoryPlan, options: EngineOptions) -> Scheduler:
    ledger = PageLedger(
        layout.kinds,
        memory.pages,
        page_tokens=options.page_tokens,
        prefix_cache=options.prefix_cache,
    )
    return Scheduler(
        ledger,
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
    image_features: ImageFeatures | None,
) -> DeviceRunner:
    pool = KVPool(
        layout,
        pages=memory.pages,
        slots=options.max_sequences,
        pages_per_sequence=-(-options.context_tokens // options.page_tokens),
        dtype=options.kv_dtype,
        device=device,
    )
    return DeviceRunner(
        decoder,
        pool,
        layout,
        slots=options.max_sequences,
        step_tokens=options.step_tokens,
        context_tokens=options.context_tokens,
        device=device,
        image_features=image_features,
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
