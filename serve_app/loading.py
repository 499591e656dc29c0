"""From a model's settings to a running replica: device, types, threads, and what the log says."""

import dataclasses
import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch

from model_zoo.chat_model import ChatModel
from model_zoo.gguf.scope import META
from model_zoo.images.decode import DecodingLimits
from model_zoo.registry import load
from runtime.assembly import EngineOptions, assemble, check_options
from runtime.errors import CaravanError, ConfigurationError, UnsupportedModelError
from runtime.memory import MemoryPlan
from runtime.vision import LocalEncoder
from serve_app.card import ModelCard
from serve_app.logs import get_logger
from serve_app.origin import Origin, comes_later, fetched_origin, present_origin
from serve_app.replica import ModelReplica, model_card
from serve_app.settings import MAX_IMAGE_BYTES, ModelSettings

DEFAULT_CONTEXT_TOKENS = 4096
PROGRESS_EVERY_S = 1.0

log = get_logger()


def check_model(settings: ModelSettings) -> str | None:
    """Builds the model without its data, so that a wrong file is told before anything starts.

    A model that has yet to be pulled cannot be checked; what is told of it is returned.
    """
    with _naming(settings):
        origin = present_origin(settings, os.environ)
        if origin is None:
            return comes_later(settings, os.environ)
        model, _ = _loaded(settings, origin, META, torch.float32)
        options = _engine_options(settings, origin, model, torch.device("cpu"))
        check_options(options, model.decoder)
        _check_image_cache(settings, model)
        _check_default_context(settings, options.context_tokens)
        return None


def load_replica(settings: ModelSettings) -> ModelReplica:
    """Everything is reserved when this returns; the engine runs."""
    with _naming(settings):
        return _load_replica(settings)


def _load_replica(settings: ModelSettings) -> ModelReplica:
    device = _device(settings)
    _log_device(device)
    origin = fetched_origin(settings, os.environ)
    model, origin = _loaded(settings, origin, device, _dtype(settings.dtype, device))
    options = _engine_options(settings, origin, model, device)
    _check_image_cache(settings, model)
    engine, memory = assemble(
        model.decoder,
        model.tokenizer.token_bytes,
        device=device,
        options=options,
        encoder=None if model.tower is None else LocalEncoder(model.tower, device=device),
    )
    engine.start()
    _log_model(settings.name, model, memory)
    _log_vision(settings.name, model, options)
    _log_left_alone(settings.name, origin)
    card = model_card(
        model,
        name=settings.name,
        context_tokens=options.context_tokens,
        device=device.type,
        reserved_bytes=memory.available_bytes - memory.headroom_bytes,
    )
    return ModelReplica(model, engine, _with_origin(card, origin), origin.opening)


def _loaded(
    settings: ModelSettings, origin: Origin, device: torch.device, dtype: torch.dtype
) -> tuple[ChatModel, Origin]:
    """The model; without a projector that it brings, but that cannot be used."""
    try:
        model = load(
            origin.path,
            projector=origin.projector,
            device=device,
            dtype=dtype,
            context_tokens=settings.context_tokens
            or origin.context_tokens
            or DEFAULT_CONTEXT_TOKENS,
            image_limits=_image_limits(settings),
            progress=None if device == META else _Progress(settings.name),
        )
    except (ConfigurationError, UnsupportedModelError) as error:
        if origin.projector is None or origin.projector_wanted:
            raise
        left_alone = (*origin.left_alone, f"projector: {error}")
        blind = dataclasses.replace(origin, projector=None, left_alone=left_alone)
        return _loaded(settings, blind, device, dtype)
    return model, origin


@contextmanager
def _naming(settings: ModelSettings) -> Iterator[None]:
    """With several models configured, an error has to say which one it is about."""
    try:
        yield
    except CaravanError as error:
        raise type(error)(f"Model {settings.name}: {error}") from None


def _device(settings: ModelSettings) -> torch.device:
    available = torch.cuda.is_available()
    if settings.device == "cuda" and not available:
        raise ConfigurationError("`device` is cuda, but this process sees no CUDA device.")
    kind = settings.device if settings.device != "auto" else "cuda" if available else "cpu"
    if kind == "cpu":
        # Ray pins OpenMP to one thread unless told otherwise.
        torch.set_num_threads(settings.threads or usable_cpus())
    return torch.device(kind)


def usable_cpus(quota_file: Path = Path("/sys/fs/cgroup/cpu.max")) -> int:
    """The processors that this process may run on, within its container's quota of time."""
    allowed = len(os.sched_getaffinity(0))
    if not quota_file.is_file():
        return allowed
    quota, _, period = quota_file.read_text().partition(" ")
    return min(allowed, max(1, int(quota) // int(period))) if quota.isdigit() else allowed


def _dtype(name: str, device: torch.device) -> torch.dtype:
    if name == "auto":
        return torch.float32 if device.type == "cpu" else torch.bfloat16
    return getattr(torch, name)


def _with_origin(card: ModelCard, origin: Origin) -> ModelCard:
    return dataclasses.replace(
        card,
        system=origin.opening.system,
        options=origin.options,
        license=origin.license or card.license,
    )


def _engine_options(
    settings: ModelSettings, origin: Origin, model: ChatModel, device: torch.device
) -> EngineOptions:
    context_tokens = _context_tokens(settings, origin, model)
    return EngineOptions(
        context_tokens=context_tokens,
        max_sequences=settings.max_sequences,
        # What is read in both directions is read in one step.
        step_tokens=max(settings.step_tokens, 0 if model.decoder.causal else context_tokens),
        cache_tokens=settings.cache_tokens,
        page_tokens=settings.page_tokens,
        kv_dtype=_dtype(settings.kv_dtype, device),
        prefix_cache=settings.prefix_cache,
        memory_bytes=settings.memory_bytes,
        max_waiting=settings.max_waiting,
        image_cache_bytes=settings.image_cache_bytes,
    )


def _image_limits(settings: ModelSettings) -> DecodingLimits:
    return DecodingLimits(
        bytes=MAX_IMAGE_BYTES,
        pixels=settings.max_image_pixels,
        frames=settings.max_image_frames,
    )


def _check_image_cache(settings: ModelSettings, model: ChatModel) -> None:
    if settings.image_cache_bytes is not None and model.tower is None:
        raise ConfigurationError(
            f"`image_cache_bytes` is {settings.image_cache_bytes:,}, but the model sees no images; "
            "remove it, or name its `projector`."
        )


def _check_default_context(settings: ModelSettings, context_tokens: int) -> None:
    asked = settings.options.num_ctx
    if asked is not None and asked > context_tokens:
        raise ConfigurationError(
            f"`defaults.num_ctx` is {asked:,}, more than `context_tokens`, {context_tokens:,}."
        )


def _context_tokens(settings: ModelSettings, origin: Origin, model: ChatModel) -> int:
    most = model.decoder.context_length
    if settings.context_tokens is not None and settings.context_tokens > most:
        raise ConfigurationError(
            f"`context_tokens` is {settings.context_tokens:,}; the model was made for "
            f"{most:,} at most."
        )
    return settings.context_tokens or min(origin.context_tokens or DEFAULT_CONTEXT_TOKENS, most)


class _Progress:
    """Says how far loading is, now and then, and when it is done."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._due = time.monotonic()

    def __call__(self, done_bytes: int, total_bytes: int) -> None:
        now = time.monotonic()
        if now < self._due and done_bytes < total_bytes:
            return
        self._due = now + PROGRESS_EVERY_S
        percent = round(100 * done_bytes / max(1, total_bytes))
        log.info(
            "loading", model=self._name, percent=percent, bytes=done_bytes, total_bytes=total_bytes
        )


def _log_device(device: torch.device) -> None:
    if device.type == "cuda":
        free, total = torch.cuda.mem_get_info(device)
        name = torch.cuda.get_device_name(device)
        log.info("device", kind="cuda", name=name, free_bytes=free, total_bytes=total)
    else:
        log.info("device", kind="cpu", cpus=os.cpu_count(), threads=torch.get_num_threads())


def _log_left_alone(name: str, origin: Origin) -> None:
    for what in origin.left_alone:
        log.info("left alone", model=name, what=what)


def _log_model(name: str, model: ChatModel, memory: MemoryPlan) -> None:
    facts = model.description
    log.info(
        "model",
        name=name,
        architecture=facts.architecture,
        quantization=facts.quantization,
        template=facts.template_source or "none: it completes text only",
        parameters=facts.parameter_count,
        weight_bytes=memory.weight_bytes,
        cache_bytes=memory.cache_bytes,
        cache_tokens=memory.cache_tokens,
        activation_bytes=memory.activation_bytes + memory.sampler_bytes,
        vision_bytes=memory.vision_bytes,
        headroom_bytes=memory.headroom_bytes,
    )


def _log_vision(name: str, model: ChatModel, options: EngineOptions) -> None:
    """Beside `vision_bytes`, which are for work and features, the tower's weights."""
    if model.tower is None:
        return
    limits = model.tower.limits
    log.info(
        "vision", model=name, weight_bytes=model.tower.weight_bytes, most_image_rows=limits.rows
    )
    if limits.rows >= options.context_tokens:
        log.info(
            "largest images do not fit",
            model=name,
            most_image_rows=limits.rows,
            context_tokens=options.context_tokens,
        )
