"""From a model's settings to a running replica: device, types, threads, and what the log says."""

import dataclasses
import os
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager

import torch

from model_zoo.chat_model import ChatModel
from model_zoo.gguf.split import further_parts
from model_zoo.gguf.tensors import META
from model_zoo.images.decode import DecodingLimits
from model_zoo.multimodal.image_cache import ImageCache
from model_zoo.rank_part import file_digest, load_part
from model_zoo.registry import load
from model_zoo.store.store import default_root
from runtime.distributed.control_channel import RankInfo, RankZero
from runtime.distributed.rank_group import Member, RankGroup
from runtime.distributed.ranks import ALONE, Ranks, Unconnected
from runtime.engine.assembly import EngineOptions, assemble, check_options, compute_part
from runtime.errors import (
    CaravanError,
    ConfigurationError,
    ModelFileError,
    UnsupportedModelError,
)
from runtime.kernels.native import explain_bus_errors
from runtime.vision.encoder import ImageEncoder, LocalEncoder
from serve_app.api.refusals import explained
from serve_app.config.settings import MAX_IMAGE_BYTES, ModelSettings
from serve_app.replica.device_map import placing_of
from serve_app.replica.image_memory import image_cache_of, set_aside_bytes
from serve_app.replica.machine import (
    LoadingProgress,
    computing_device,
    log_device,
    number_type,
    share_threads,
)
from serve_app.replica.replica import ModelReplica, model_card
from serve_app.replica.resolved_model import (
    ModelFiles,
    comes_later,
    fetched_origin,
    present_origin,
    told_of,
)
from serve_app.replica.served_files import ServedFiles, warn_of_exposed
from serve_app.replica.startup_log import (
    log_encoder,
    log_left_alone,
    log_model,
    log_ready,
    log_reduced_context,
    log_vision,
)
from serve_app.vision.assembly import assemble_encoder
from serve_app.vision.encoder import EncoderReplica, check_cache
from serve_app.vision.encoder_choice import Directory
from serve_app.vision.encoder_pool import PoolEncoder, PoolRules

DEFAULT_CONTEXT_TOKENS = 4096


@dataclasses.dataclass(frozen=True, slots=True)
class Outline:
    """A model without its weights, laid out for `device`."""

    model: ChatModel
    origin: ModelFiles
    options: EngineOptions
    device: torch.device


def check_model(settings: ModelSettings) -> str | None:
    """Builds the model without its data, so that a wrong file is told before anything starts.

    A model that has yet to be pulled cannot be checked; what is told of it is returned.
    """
    with _naming(settings):
        origin = present_origin(settings, os.environ)
        if origin is None:
            return comes_later(settings, os.environ)
        _outlined(settings, origin, META, torch.device("cpu"))
        return None


def load_outline(settings: ModelSettings, origin: ModelFiles) -> Outline:
    """What the model is and how it would be served here; its weights stay on disk."""
    with _naming(settings):
        device = _main_device(settings)
        # What the kernels of a CPU need beside the weights shows on that CPU alone.
        return _outlined(settings, origin, device if device.type == "cpu" else META, device)


def load_replica(
    settings: ModelSettings,
    encoders: Directory | None = None,
    lead: RankZero | None = None,
    *,
    origin: ModelFiles | None = None,
) -> ModelReplica:
    """Everything is reserved when this returns; the engine runs.

    `encoders`: of the pool that encodes its images; None where it does so itself. `lead`: where
    the processes join that compute it together with this one, by `compute_part_of`; None where it
    is alone. `origin`: where its files are, None for where the settings say, pulled if need be.
    """
    with _naming(settings), ExitStack() as failing:
        device = _main_device(settings)
        rank_group = None
        if lead is not None:
            failing.callback(lead.close)
            rank_group = RankGroup(lead, device)
            failing.callback(rank_group.close)
            share_threads(settings.threads, rank_group.machine_ranks)
        origin = origin or fetched_origin(settings, os.environ)
        replica = _load_replica(settings, origin, encoders, device, rank_group)
        failing.pop_all()
        return replica


def compute_part_of(settings: ModelSettings, rank_info: RankInfo) -> None:
    """A rank beside the replica's own process, until that ends; it hears why this one fails."""
    device = _main_device(settings)
    member = Member(rank_info, device)
    try:
        share_threads(settings.threads, member.machine_ranks)
        log_device(device)
        origin = fetched_origin(settings, os.environ)
        decoder = load_part(
            origin.path,
            device=device,
            dtype=number_type(settings.dtype, device),
            context_tokens=_wanted_context(settings, origin),
            ranks=member.ranks,
            progress=LoadingProgress(settings.name),
        )
        member.tell_loaded(file_digest(origin.path))
        if device.type == "cpu":
            explain_bus_errors()
        compute_part(decoder, member, device=device)
    except Exception as error:
        member.control_channel.fail(error)
        raise
    finally:
        member.close()


def load_encoder(settings: ModelSettings) -> EncoderReplica:
    """An encoder of the model's pool: of the model it loads the tower alone."""
    with _naming(settings):
        vision = settings.vision
        device = computing_device(vision.computing_device, vision.threads)
        log_device(device)
        origin = fetched_origin(settings, os.environ)
        dtype = number_type(vision.dtype, device)
        model, origin = _loaded(settings, origin, META, dtype, vision_device=device)
        _served_files(settings, origin, model, mapped=device.type == "cpu")
        _check_vision(settings, model)
        assert model.vision is not None
        encoder = assemble_encoder(model.vision, vision, device=device)
        log_encoder(settings.name, encoder)
        return encoder


def _outlined(
    settings: ModelSettings, origin: ModelFiles, where: torch.device, device: torch.device
) -> Outline:
    """As `device` would compute it, with the weights that it has on another one."""
    dtype = number_type(settings.dtype, device)
    ranks = _unconnected(settings)
    model, origin = _loaded(settings, origin, where, dtype, ranks=ranks, read=False)
    options = _engine_options(settings, origin, model, device, image_cache_of(settings, model))
    check_options(options, model.decoder)
    _check_image_cache(settings, model)
    _check_vision(settings, model)
    _check_default_context(settings, options.context_tokens)
    return Outline(model, origin, options, device)


def _load_replica(
    settings: ModelSettings,
    origin: ModelFiles,
    encoders: Directory | None,
    device: torch.device,
    rank_group: RankGroup | None,
) -> ModelReplica:
    begun = time.monotonic()
    log_device(device)
    vision_device = device if encoders is None else META
    dtype = number_type(settings.dtype, device)
    ranks = ALONE if rank_group is None else rank_group.ranks
    model, origin = _loaded(
        settings, origin, device, dtype, vision_device=vision_device, ranks=ranks
    )
    # On GPUs weights are copies; what stays on the host lies in the files.
    mapped = device.type == "cpu" or settings.num_gpu is not None
    files = _served_files(settings, origin, model, mapped=mapped)
    if rank_group is not None:
        rank_group.await_parts(file_digest(origin.path))
    image_cache = image_cache_of(settings, model)
    options = _engine_options(settings, origin, model, device, image_cache)
    _log_context(settings, origin, options.context_tokens)
    _check_image_cache(settings, model)
    _check_vision(settings, model)
    encoder = _image_encoder(settings, model, device, encoders)
    loaded = time.monotonic()
    engine, memory = assemble(
        model.decoder,
        model.tokenizer.token_bytes,
        device=device,
        options=options,
        encoder=encoder,
        rank_group=rank_group,
    )
    engine.start()
    log_model(settings.name, model, memory)
    log_vision(settings, encoder, options)
    log_left_alone(settings.name, origin)
    log_ready(settings.name, load_s=loaded - begun, warm_up_s=time.monotonic() - loaded)
    card = model_card(
        model,
        name=settings.name,
        context_tokens=options.context_tokens,
        device=device.type,
        reserved_bytes=memory.reserved_bytes + memory.others_bytes,
    )
    return ModelReplica(model, engine, told_of(card, origin), origin.opening, image_cache, files)


def _served_files(
    settings: ModelSettings, origin: ModelFiles, model: ChatModel, *, mapped: bool
) -> ServedFiles:
    """`mapped`: they are computed with where they lie."""
    paths = [origin.path, *further_parts(origin.path, model.description.metadata)]
    paths += [] if origin.projector is None else [origin.projector]
    warn_of_exposed(settings.name, paths, default_root(os.environ))
    if mapped:
        explain_bus_errors()
    return ServedFiles(paths if mapped else ())


def _image_encoder(
    settings: ModelSettings, model: ChatModel, device: torch.device, encoders: Directory | None
) -> ImageEncoder | None:
    if model.vision is None:
        return None
    if encoders is None:
        return LocalEncoder(model.vision.tower, device=device)
    rules = PoolRules(timeout_s=settings.vision.timeout_s)
    limits, name = model.vision.tower.limits, model.vision.name
    return PoolEncoder(limits, encoders, tower=name, device=device, rules=rules)


def _loaded(
    settings: ModelSettings,
    origin: ModelFiles,
    device: torch.device,
    dtype: torch.dtype,
    *,
    vision_device: torch.device | None = None,
    ranks: Ranks = ALONE,
    read: bool = True,
) -> tuple[ChatModel, ModelFiles]:
    """The model; without a projector or a template that it brings, but that cannot be used."""
    try:
        model = load(
            origin.path,
            projector=origin.projector,
            device=device,
            vision_device=vision_device,
            dtype=dtype,
            context_tokens=_wanted_context(settings, origin),
            ranks=ranks,
            place=placing_of(settings, _wanted_context(settings, origin), device),
            image_limits=_image_limits(settings),
            progress=LoadingProgress(settings.name) if read else None,
            read=read,
        )
    except (ConfigurationError, UnsupportedModelError) as error:
        if origin.projector is None or origin.projector_wanted:
            raise
        blind = origin.without("projector", error)
        return _loaded(
            settings, blind, device, dtype, vision_device=vision_device, ranks=ranks, read=read
        )
    if origin.template is None:
        return model, origin
    try:
        return model.with_template(origin.template, origin="the model's own layer"), origin
    except ModelFileError as error:
        return model, origin.without("template", error)


@contextmanager
def _naming(settings: ModelSettings) -> Iterator[None]:
    """Whatever fails is a CaravanError of one line that names the model."""
    try:
        yield
    except CaravanError as error:
        raise type(error)(f"Model {settings.name}: {error}") from None
    except Exception as error:
        raise explained(f"Model {settings.name}", error) from error


def _main_device(settings: ModelSettings) -> torch.device:
    kind, main = settings.computing_device, settings.main_gpu
    return computing_device(kind, settings.threads, main_gpu=main)


def _unconnected(settings: ModelSettings) -> Ranks:
    size = settings.parallel.tensor
    return ALONE if size == 1 else Unconnected(size)


def _wanted_context(settings: ModelSettings, origin: ModelFiles) -> int:
    """The longest sequence that will be served, as far as the file allows it."""
    return settings.context_tokens or origin.context_tokens or DEFAULT_CONTEXT_TOKENS


def _engine_options(
    settings: ModelSettings,
    origin: ModelFiles,
    model: ChatModel,
    device: torch.device,
    image_cache: ImageCache,
) -> EngineOptions:
    context_tokens = _context_tokens(settings, origin, model)
    return EngineOptions(
        context_tokens=context_tokens,
        max_sequences=settings.max_sequences,
        # What is read in both directions is read in one step.
        step_tokens=max(settings.step_tokens, 0 if model.decoder.causal else context_tokens),
        cache_tokens=settings.cache_tokens,
        page_tokens=settings.page_tokens,
        kv_dtype=number_type(settings.kv_dtype, device),
        prefix_cache=settings.prefix_cache,
        memory_bytes=settings.memory_bytes,
        max_waiting=settings.max_waiting,
        image_cache_bytes=settings.image_cache_bytes,
        set_aside_bytes=set_aside_bytes(settings, model, image_cache, device),
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


def _check_vision(settings: ModelSettings, model: ChatModel) -> None:
    if settings.vision.pooled and model.tower is None:
        raise ConfigurationError(
            "`vision` asks for encoders, but the model sees no images; remove it, or name its "
            "`projector`."
        )
    if model.tower is not None:
        check_cache(settings.vision.cache_bytes, model.tower)


def _log_context(settings: ModelSettings, origin: ModelFiles, served: int) -> None:
    """The model's own parameters may ask for more than it is served with."""
    asked = origin.context_tokens
    if asked is not None and served < asked:
        configured = f"`context_tokens` of its configuration is {served:,}"
        reason = "the model was trained for no more" if not settings.context_tokens else configured
        log_reduced_context(settings.name, asked=asked, served=served, reason=reason)


def _check_default_context(settings: ModelSettings, context_tokens: int) -> None:
    asked = settings.options.num_ctx
    if asked is not None and asked > context_tokens:
        raise ConfigurationError(
            f"`defaults.num_ctx` is {asked:,}, more than `context_tokens`, {context_tokens:,}."
        )


def _context_tokens(settings: ModelSettings, origin: ModelFiles, model: ChatModel) -> int:
    most = model.decoder.context_length
    if settings.context_tokens is not None and settings.context_tokens > most:
        raise ConfigurationError(
            f"`context_tokens` is {settings.context_tokens:,}; the model was made for "
            f"{most:,} at most."
        )
    return settings.context_tokens or min(origin.context_tokens or DEFAULT_CONTEXT_TOKENS, most)
