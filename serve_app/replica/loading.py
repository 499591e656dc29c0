"""Loads a running replica, rank or vision encoder from a model's settings."""

import dataclasses
import os
import time
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path

import torch

from model_zoo.chat_model import ChatModel
from model_zoo.gguf.shared_weights import SharedWeights
from model_zoo.gguf.split import further_parts
from model_zoo.gguf.tensors import META
from model_zoo.images.decode import DecodingLimits
from model_zoo.multimodal.image_cache import ImageCache
from model_zoo.rank_part import files_digest, load_part
from model_zoo.registry import LoadOptions, load
from runtime.distributed.control_channel import RankInfo, RankZero
from runtime.distributed.rank_group import Member, RankGroup
from runtime.distributed.ranks import ALONE, Unconnected
from runtime.engine.assembly import assemble, compute_part
from runtime.engine.draft_assembly import check_draft
from runtime.engine.engine_options import EngineOptions, check_options
from runtime.errors import ConfigurationError, ModelFileError, UnsupportedModelError
from runtime.kernels.native import explain_bus_errors
from runtime.vision.encoder import ImageEncoder, LocalEncoder
from serve_app.config.settings import MAX_IMAGE_BYTES, ModelSettings
from serve_app.replica.device_map import device_map_options
from serve_app.replica.device_setup import (
    LoadingProgress,
    cache_type,
    compute_type,
    computing_device,
    log_devices,
    number_type,
    require_cache_type,
    require_deterministic,
    share_threads,
    tiling_options,
)
from serve_app.replica.draft_model import load_draft
from serve_app.replica.image_memory import create_image_cache, default_pixels, set_aside_bytes
from serve_app.replica.load_errors import named_errors
from serve_app.replica.model_cards import model_card
from serve_app.replica.model_files import ModelFiles, pulled_files
from serve_app.replica.model_plan import ModelPlan
from serve_app.replica.replica import ModelReplica
from serve_app.replica.served_files import ServedFiles
from serve_app.replica.startup_log import (
    log_encoder,
    log_model,
    log_ready,
    log_reduced_context,
    log_unused,
    log_vision,
)
from serve_app.replica.trace_file import TraceFile
from serve_app.vision.encoder_assembly import assemble_encoder
from serve_app.vision.encoder_pool import PoolEncoder, PoolRules
from serve_app.vision.encoder_ranking import EncoderSource
from serve_app.vision.encoder_replica import EncoderReplica, check_cache

DEFAULT_CONTEXT_TOKENS = 4096


def check_files(settings: ModelSettings, files: ModelFiles) -> None:
    """Builds the model without its weights; raises a CaravanError for a bad file or setting."""
    if settings.computing_device == "cpu":
        require_cache_type(settings.kv_dtype, torch.device("cpu"))
    _plan(settings, files, META, torch.device("cpu"))


def plan_model(
    settings: ModelSettings, files: ModelFiles, device: torch.device | None = None
) -> ModelPlan:
    """The model as it would be served; its weights are not read. `device`: by default that of this
    process; it need not exist."""
    device = device or _main_device(settings)
    # The memory that CPU kernels need in addition to the weights is known only on the CPU.
    return _plan(settings, files, device if device.type == "cpu" else META, device)


def load_replica(
    settings: ModelSettings,
    encoders: EncoderSource | None = None,
    rank_zero: RankZero | None = None,
    *,
    files: ModelFiles | None = None,
    shared: SharedWeights | None = None,
) -> ModelReplica:
    """A replica with a running engine and all memory reserved.

    `encoders`: the pool that encodes its images; None: it encodes them itself. `rank_zero`: the
    listener that the other ranks join; None: it computes alone. `files`: by default those of the
    settings, pulled if necessary. `shared`: weights of other models of this process.
    """
    with named_errors(f"Model {settings.name}"), ExitStack() as on_failure:
        device = _main_device(settings)
        rank_group = None
        if rank_zero is not None:
            on_failure.callback(rank_zero.close)
            rank_group = RankGroup(rank_zero, device)
            on_failure.callback(rank_group.close)
            share_threads(settings.threads, rank_group.machine_ranks)
        files = files or pulled_files(settings, os.environ)
        replica = _load_replica(settings, files, encoders, device, rank_group, shared)
        on_failure.pop_all()
        return replica


def run_rank(settings: ModelSettings, rank_info: RankInfo) -> None:
    """Computes as a rank other than 0 until rank 0 ends. Errors are reported to rank 0 as well."""
    device = _main_device(settings)
    member = Member(rank_info, device)
    try:
        share_threads(settings.threads, member.machine_ranks)
        log_devices(device, kind=settings.computing_device)
        files = pulled_files(settings, os.environ)
        loading = _complete(LoadOptions(ranks=member.ranks), settings, files)
        dtype = number_type(settings.dtype, device)
        decoder = load_part(files.path, device=device, dtype=dtype, options=loading)
        member.report_loaded(files_digest(files.path, files.adapters, blobs=files.blobs))
        if device.type == "cpu":
            explain_bus_errors()
        compute_part(decoder, member, device=device)
    except Exception as error:
        member.control_channel.fail(error)
        raise
    finally:
        member.close()


def load_encoder(settings: ModelSettings, contexts: Sequence[int | None] = ()) -> EncoderReplica:
    """A vision encoder of the model's pool; only the vision model's weights are loaded.

    `contexts`: `context_tokens` of the other models of the pool. Images of the one with the longest
    context may be largest, and the encoder accepts those.
    """
    with named_errors(f"Model {settings.name}"):
        vision = settings.vision
        device = computing_device(vision.computing_device, vision.threads)
        log_devices(device, kind=vision.computing_device)
        # Without adapters: they change text models only, and several models may share an encoder.
        files = dataclasses.replace(pulled_files(settings, os.environ), adapters=())
        longest = max(
            _requested_context(settings.model_copy(update={"context_tokens": given}), files)
            for given in (settings.context_tokens, *contexts)
        )
        settings = settings.model_copy(update={"context_tokens": longest})
        dtype = number_type(vision.dtype, device)
        model, files = _load_model(settings, files, META, dtype, LoadOptions(vision_device=device))
        if device.type == "cpu":
            explain_bus_errors()
        _check_vision(settings, model)
        assert model.vision is not None
        if settings.deterministic:  # libraries attend to images in batches
            vision = vision.model_copy(update={"batch_images": 1})
        context_tokens = min(longest, model.decoder.context_length)
        encoder = assemble_encoder(
            model.vision, vision, device=device, context_tokens=context_tokens
        )
        log_encoder(settings.name, encoder)
        return encoder


def _plan(
    settings: ModelSettings, files: ModelFiles, weight_device: torch.device, device: torch.device
) -> ModelPlan:
    """`device`: the device that would compute; the empty weights are on `weight_device`."""
    dtype = number_type(settings.dtype, device)
    size = settings.parallel.tensor
    ranks = ALONE if size == 1 else Unconnected(size)
    loading = LoadOptions(ranks=ranks, read=False)
    model, files = _load_model(settings, files, weight_device, dtype, loading)
    options = _engine_options(settings, files, model, device, create_image_cache(settings, model))
    check_options(options, model.decoder)
    draft = _load_draft(settings, files, model, weight_device, LoadOptions(read=False))
    if draft is not None:
        check_draft(draft.decoder, model.decoder)
    _check_vision(settings, model)
    _check_default_context(settings, options.context_tokens)
    return ModelPlan(model, files, options, device, None if draft is None else draft.decoder)


def _load_replica(
    settings: ModelSettings,
    files: ModelFiles,
    encoders: EncoderSource | None,
    device: torch.device,
    rank_group: RankGroup | None,
    shared: SharedWeights | None,
) -> ModelReplica:
    started = time.monotonic()
    log_devices(device, kind=settings.computing_device)
    dtype = number_type(settings.dtype, device)
    loading = LoadOptions(
        vision_device=device if encoders is None else META,
        ranks=ALONE if rank_group is None else rank_group.ranks,
        shared=shared,
    )
    model, files = _load_model(settings, files, device, dtype, loading)
    draft = _load_draft(settings, files, model, device, LoadOptions(shared=shared))
    served_files = _mapped_files(settings, files, model, draft, device)
    if rank_group is not None:
        rank_group.wait_loaded(files_digest(files.path, files.adapters, blobs=files.blobs))
    image_cache = create_image_cache(settings, model)
    options = _engine_options(settings, files, model, device, image_cache)
    _log_reduced_context(settings, files, options.context_tokens)
    encoder = _image_encoder(settings, model, device, encoders, options.context_tokens)
    trace_file = _trace_file(settings, model)
    loaded = time.monotonic()
    engine, memory = assemble(
        model.decoder,
        model.tokenizer.token_bytes,
        device=device,
        options=options,
        encoder=encoder,
        rank_group=rank_group,
        trace_sink=trace_file,
        draft=None if draft is None else draft.decoder,
    )
    engine.start()
    log_model(settings.name, model, memory)
    log_vision(settings, encoder, options)
    log_unused(settings.name, files)
    log_ready(settings.name, load_s=loaded - started, warm_up_s=time.monotonic() - loaded)
    plan, reserved = ModelPlan(model, files, options, device), memory.reserved_bytes
    card = model_card(plan, settings.name, reserved_bytes=reserved + memory.others_bytes)
    return ModelReplica(
        model, engine, card, files.prompt_defaults, image_cache, served_files, trace_file
    )


def _trace_file(settings: ModelSettings, model: ChatModel) -> TraceFile | None:
    if settings.trace_folder is None:
        return None
    tokenizer = model.tokenizer
    return TraceFile(
        Path(settings.trace_folder),
        settings.name,
        max_bytes=settings.trace_bytes,
        every=settings.trace,
        # A model may have more token ids than its file names.
        spell=lambda token: tokenizer.token_text(token) if token < tokenizer.vocab_size else "",
    )


def _mapped_files(
    settings: ModelSettings,
    files: ModelFiles,
    model: ChatModel,
    draft: ChatModel | None,
    device: torch.device,
) -> ServedFiles:
    """The files that stay mapped: those with weights on the host. Weights on GPUs are copies."""
    if device.type != "cpu" and settings.num_gpu is None:
        return ServedFiles()
    explain_bus_errors()
    paths = [*files.paths, *further_parts(files.path, model.description.metadata)]
    if files.draft is not None and draft is not None:
        paths += further_parts(files.draft, draft.description.metadata)
    return ServedFiles(paths)


def _image_encoder(
    settings: ModelSettings,
    model: ChatModel,
    device: torch.device,
    encoders: EncoderSource | None,
    context_tokens: int,
) -> ImageEncoder | None:
    _check_vision(settings, model)
    vision = model.vision
    if vision is None:
        return None
    if encoders is None:
        batch = 1 if settings.deterministic else None  # libraries attend to images in batches
        return LocalEncoder(
            vision.tower,
            device=device,
            weight_bytes=vision.weight_bytes,
            batch_images=batch,
            first=vision.first_image(device, context_tokens),
        )
    rules = PoolRules(timeout_s=settings.vision.timeout_s)
    limits, name = vision.tower.limits, vision.name
    return PoolEncoder(limits, encoders, tower=name, device=device, rules=rules)


def _load_model(
    settings: ModelSettings,
    files: ModelFiles,
    device: torch.device,
    dtype: torch.dtype,
    options: LoadOptions,
) -> tuple[ChatModel, ModelFiles]:
    """The model and its files; a pulled projector or template that is not supported is left out.

    `options`: as of `_complete`, besides the place of layers.
    """
    place = device_map_options(settings, _requested_context(settings, files), device)
    complete = dataclasses.replace(_complete(options, settings, files), place=place)
    try:
        model = load(
            files.path, projector=files.projector, device=device, dtype=dtype, options=complete
        )
    except (ConfigurationError, UnsupportedModelError) as error:
        if files.projector is None or files.projector_required:
            raise
        return _load_model(settings, files.without("projector", error), device, dtype, options)
    model = dataclasses.replace(model, suffix_first=settings.spm_infill)
    if files.template is None:
        return model, files
    try:
        return model.with_template(files.template, origin="the model's own layer"), files
    except ModelFileError as error:
        return model, files.without("template", error)


def _load_draft(
    settings: ModelSettings,
    files: ModelFiles,
    model: ChatModel,
    device: torch.device,
    options: LoadOptions,
) -> ChatModel | None:
    """The draft model of `model`; `options`: as of `_complete`."""
    if files.draft is None:
        return None
    # Without adapters, which are the model's; answers do not depend on the bits of proposals.
    complete = dataclasses.replace(
        _complete(options, settings, files, label=f"{settings.name} (draft)"),
        adapters=(),
        deterministic=False,
    )
    dtype = number_type(settings.dtype, device)
    return load_draft(files.draft, model.tokenizer, device=device, dtype=dtype, options=complete)


def _complete(
    options: LoadOptions, settings: ModelSettings, files: ModelFiles, *, label: str | None = None
) -> LoadOptions:
    """`options`, which do not follow from settings and files, and those that do. `label`: names the
    model in the log."""
    complete = dataclasses.replace(
        options,
        context_tokens=_requested_context(settings, files),
        image_limits=DecodingLimits(
            bytes=MAX_IMAGE_BYTES, pixels=settings.max_image_pixels or default_pixels()
        ),
        adapters=files.adapters,
    )
    if not options.read:
        return complete
    return dataclasses.replace(
        complete,
        progress=LoadingProgress(label or settings.name),
        compute=compute_type(settings.compute),
        deterministic=settings.deterministic,
        tiling=tiling_options(settings.repack),
    )


def _main_device(settings: ModelSettings) -> torch.device:
    kind, main = settings.computing_device, settings.main_gpu
    device = computing_device(kind, settings.threads, main_gpu=main)
    require_cache_type(settings.kv_dtype, device)
    if settings.deterministic:
        require_deterministic(device, settings.parallel.tensor)
    return device


def _requested_context(settings: ModelSettings, files: ModelFiles) -> int:
    return settings.context_tokens or files.context_tokens or DEFAULT_CONTEXT_TOKENS


def _served_context(settings: ModelSettings, files: ModelFiles, model: ChatModel) -> int:
    limit = model.decoder.context_length
    if settings.context_tokens is not None and settings.context_tokens > limit:
        raise ConfigurationError(
            f"`context_tokens` is {settings.context_tokens:,}; the model was made for "
            f"{limit:,} at most. Lower it."
        )
    return min(_requested_context(settings, files), limit)


def _engine_options(
    settings: ModelSettings,
    files: ModelFiles,
    model: ChatModel,
    device: torch.device,
    image_cache: ImageCache,
) -> EngineOptions:
    context_tokens = _served_context(settings, files, model)
    generates = model.decoder.generates and model.description.pooling is None
    return EngineOptions(
        context_tokens=context_tokens,
        max_sequences=settings.max_sequences,
        # A bidirectional model must compute a whole text in one step.
        step_tokens=max(settings.step_tokens, 0 if model.decoder.causal else context_tokens),
        cache_tokens=settings.cache_tokens,
        page_tokens=settings.page_tokens,
        kv_dtype=cache_type(settings.kv_dtype, device, generates=generates),
        prefix_cache=settings.prefix_cache,
        state_checkpoint_bytes=settings.state_checkpoint_bytes,
        host_cache_bytes=settings.host_cache_bytes,
        cuda_graphs=settings.cuda_graphs,
        memory_bytes=settings.memory_bytes,
        max_waiting=settings.max_waiting,
        image_cache_bytes=settings.image_cache_bytes,
        set_aside_bytes=set_aside_bytes(model, image_cache, device),
        proposed_tokens=settings.speculation.proposed_tokens,
        target_gap_ms=settings.target_gap_ms,
        ngram=settings.speculation.ngram,
    )


def _check_vision(settings: ModelSettings, model: ChatModel) -> None:
    if model.tower is not None:
        check_cache(settings.vision.cache_bytes, model.tower)
        return
    given = {
        "image_cache_bytes": settings.image_cache_bytes is not None,
        "vision": settings.vision.pooled,
    }
    for key in (key for key, present in given.items() if present):
        raise ConfigurationError(
            f"`{key}` is given, but the model has no vision. Remove it, or set `projector`."
        )


def _check_default_context(settings: ModelSettings, context_tokens: int) -> None:
    default = settings.options.num_ctx
    if default is not None and default > context_tokens:
        raise ConfigurationError(
            f"`defaults.num_ctx` is {default:,}, more than `context_tokens`, {context_tokens:,}."
        )


def _log_reduced_context(settings: ModelSettings, files: ModelFiles, served: int) -> None:
    stated = files.context_tokens
    if stated is not None and served < stated:
        configured = f"`context_tokens` of its configuration is {served:,}"
        reason = configured if settings.context_tokens else "the model was trained for no more"
        log_reduced_context(settings.name, requested=stated, served=served, reason=reason)
