"""The memory that serving a model needs, planned from the headers of its files."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import torch

from model_zoo.gguf.adapter import Adapter
from model_zoo.gguf.header_only_file import HeaderOnlyFile
from model_zoo.gguf.scope import ScopeOptions, TensorScope
from model_zoo.gguf.tensors import META
from model_zoo.multimodal.vision_loading import BuiltVision, find_vision
from model_zoo.registry import (
    LoadOptions,
    build_text,
    class_for,
    open_adapters,
    pooling_of,
    token_metadata,
)
from model_zoo.tokenizers.tokenizer import Tokenizer, load_tokenizer
from runtime.engine.assembly import plan_engine_memory
from runtime.engine.engine_options import EngineOptions
from runtime.engine.memory_plan import LEFT_FREE, MemoryPlan, available_bytes
from runtime.errors import ConfigurationError, DoesNotFitError, UnsupportedModelError
from runtime.host_limits import usable_cpus
from runtime.kernels.native import needs_compiling
from runtime.vision.encoder import ImageLimits, PlannedEncoder
from runtime.worker.model import DecoderModel
from serve_app.cli.model_facts import LocatedModel, ModelFacts
from serve_app.cli.terminal import print_note
from serve_app.config.settings import ModelSettings
from serve_app.replica.device_setup import cache_type, number_type
from serve_app.replica.draft_model import load_draft
from serve_app.replica.image_memory import default_cache_bytes, default_pixels, held_bytes
from serve_app.replica.loading import DEFAULT_CONTEXT_TOKENS

_NO_LIMIT = 1 << 62
# Planning takes time proportional to the context, and a file may state any context.
_MAX_WHOLE_CONTEXT = 1 << 21
_DEFAULTS = ModelSettings.model_fields


@dataclass(frozen=True, slots=True)
class ServingMemory:
    """Bytes for `slots` concurrent requests, each with a context of `context_tokens`.

    `vision_weight_bytes`: the vision model's part of `weight_bytes`; `vision_bytes`: memory to
    encode images, in addition to the weights; `projector_left_alone`: why the model's own projector
    is not used. `draft_bytes`: all of the draft model, its cache included. `least_bytes`: the
    minimum to start, with a cache for one context.
    `whole_context_tokens`: the context that the model was trained for;
    `whole_context_cache_bytes`: the cache for one request of that length, None beyond a limit.
    `available_bytes` and `cache_tokens`: memory and cache positions on this machine, None if it has
    no such device. `refusal`: why the model cannot be served here.
    """

    device: str
    slots: int
    context_tokens: int
    kv_dtype: str
    weight_bytes: int
    vision_weight_bytes: int
    cache_bytes: int
    activation_bytes: int
    vision_bytes: int
    sampler_bytes: int
    draft_bytes: int
    total_bytes: int
    least_bytes: int
    whole_context_tokens: int
    whole_context_cache_bytes: int | None
    available_bytes: int | None
    cache_tokens: int | None
    refusal: str | None
    projector_left_alone: str | None


@dataclass(frozen=True, slots=True, eq=False)
class _Files:
    """The headers of a model's files. `context_tokens`: the context to serve."""

    facts: ModelFacts
    projector: Path | None
    adapters: Sequence[Adapter]
    draft: Path | None
    context_tokens: int


@dataclass(frozen=True, slots=True, eq=False)
class _UnloadedModel:
    """A model that is built without reading its weights, and its draft model."""

    decoder: DecoderModel
    encoder: PlannedEncoder | None
    draft: DecoderModel | None
    image_bytes: int = 0  # of the same memory, for the images of requests
    left_alone: str | None = None


def serving_memory(
    facts: ModelFacts,
    location: LocatedModel,
    *,
    context_tokens: int | None,
    own_context_tokens: int | None = None,
    slots: int | None,
    device: str,
    projector_wanted: bool = False,
) -> ServingMemory:
    """Plans the memory as for serving; None means the default of the settings.

    `facts`: of the file of `location`. `own_context_tokens`: `num_ctx` of the model's own
    parameters; limited to the trained context. `projector_wanted`: whether the user named the
    projector. ConfigurationError for a longer context than the model's, an unsuitable projector or
    an unsuitable draft model, ModelFileError for a model that is not supported.
    """
    where = _device(device)
    adapters = open_adapters(location.adapters, facts.metadata, read=False)
    wanted_tokens = context_tokens or own_context_tokens or DEFAULT_CONTEXT_TOKENS
    files = _Files(facts, location.projector, adapters, location.draft, wanted_tokens)
    outline = _outline(files, where, wanted=projector_wanted)
    most = outline.decoder.context_length
    own = min(own_context_tokens or DEFAULT_CONTEXT_TOKENS, most)
    generates = outline.decoder.generates and pooling_of(facts.file, facts.metadata) is None
    options = _options(context_tokens or own, slots, where, generates=generates)
    full = _plan(outline, options, where)
    available, held, refusal = _room(outline, options, where)
    return ServingMemory(
        device=where.type,
        slots=options.max_sequences,
        context_tokens=options.context_tokens,
        kv_dtype=options.kv_dtype.value,
        weight_bytes=full.weight_bytes,
        vision_weight_bytes=full.weight_bytes - outline.decoder.weight_bytes,
        cache_bytes=full.cache_bytes,
        activation_bytes=full.activation_bytes,
        vision_bytes=full.vision_bytes,
        sampler_bytes=full.sampler_bytes,
        draft_bytes=full.draft_bytes,
        total_bytes=full.reserved_bytes,
        least_bytes=full.least_bytes,
        whole_context_tokens=most,
        whole_context_cache_bytes=_whole_context_bytes(outline, options, where),
        available_bytes=available,
        cache_tokens=held,
        refusal=refusal,
        projector_left_alone=outline.left_alone,
    )


def _options(
    context_tokens: int, slots: int | None, device: torch.device, *, generates: bool
) -> EngineOptions:
    return EngineOptions(
        context_tokens=context_tokens,
        max_sequences=slots or _DEFAULTS["max_sequences"].default,
        step_tokens=max(slots or 0, _DEFAULTS["step_tokens"].default),
        page_tokens=_DEFAULTS["page_tokens"].default,
        kv_dtype=cache_type(_DEFAULTS["kv_dtype"].default, device, generates=generates),
        memory_bytes=_NO_LIMIT,
        proposed_tokens=_DEFAULTS["speculation"].default.proposed_tokens,
        cuda_graphs=_DEFAULTS["cuda_graphs"].default,
    )


def _outline(files: _Files, device: torch.device, *, wanted: bool) -> _UnloadedModel:
    """The model with its vision model; without it if the model's own projector does not fit."""
    try:
        return _built_for(files, device)
    except (ConfigurationError, UnsupportedModelError) as error:
        if files.projector is None or wanted:
            raise
        text_only = replace(files, projector=None)
        return replace(_built_for(text_only, device), left_alone=str(error))


def _built_for(files: _Files, device: torch.device) -> _UnloadedModel:
    """The model without reading its weights. On a CPU they are views of the mapped file; for other
    devices, which would copy them, they are on "meta"."""
    outline = _built_on(files, META, device)
    if device.type != "cpu":
        return outline
    torch.set_num_threads(usable_cpus())
    if needs_compiling():
        print_note("compiling the CPU kernels, once for this instruction set and their version")
    return _built_on(files, device, device)


def _built_on(files: _Files, where: torch.device, device: torch.device) -> _UnloadedModel:
    """`where`: the device of the weights; `device`: the device to serve on."""
    facts = files.facts
    options = ScopeOptions(adapters=files.adapters, context_tokens=files.context_tokens)
    w = TensorScope(facts.file, device=where, dtype=_number_type(device), options=options)
    decoder, *_ = build_text(class_for(facts.metadata), w, facts.metadata)
    vision = _vision(facts, files.projector, w.undivided(), decoder)
    w.check()
    encoder, images = None, 0
    if vision is not None:
        tower = vision.parts.tower
        encoder = PlannedEncoder.of(tower, device, weight_bytes=vision.weight_bytes)
        images = _image_bytes(tower.limits) if device.type == "cpu" else 0
    return _UnloadedModel(decoder, encoder, _draft(files, where, device), images)


def _image_bytes(limits: ImageLimits) -> int:
    return held_bytes(default_cache_bytes(limits), default_pixels())


def _draft(files: _Files, where: torch.device, device: torch.device) -> DecoderModel | None:
    if files.draft is None:
        return None
    options, dtype = LoadOptions(read=False), _number_type(device)
    tokenizer = _tokenizer(files.facts)
    return load_draft(files.draft, tokenizer, device=where, dtype=dtype, options=options).decoder


def _vision(
    facts: ModelFacts, projector: Path | None, w: TensorScope, decoder: DecoderModel
) -> BuiltVision | None:
    """`w`: scope of the text model, whose file may contain the vision model."""
    vision = find_vision(facts.file, facts.metadata, projector)
    if vision is None:
        return None
    if vision.is_own:
        vision = replace(vision, file=HeaderOnlyFile.open(vision.file.path))
        options = ScopeOptions(context_tokens=w.context_tokens)
        w = TensorScope(vision.file, device=w.device, dtype=w.dtype, options=options)
    built = vision.build(w, _tokenizer(facts), decoder)
    w.check()
    return built


def _tokenizer(facts: ModelFacts) -> Tokenizer:
    return load_tokenizer(token_metadata(facts.file), architecture=facts.metadata.architecture)


def _plan(outline: _UnloadedModel, options: EngineOptions, device: torch.device) -> MemoryPlan:
    return plan_engine_memory(
        outline.decoder,
        device=device,
        options=options,
        encoder=outline.encoder,
        draft=outline.draft,
    )


def _whole_context_bytes(
    outline: _UnloadedModel, options: EngineOptions, device: torch.device
) -> int | None:
    most = outline.decoder.context_length
    if most > _MAX_WHOLE_CONTEXT:
        return None
    alone = replace(options, context_tokens=most, max_sequences=1)
    return _plan(outline, alone, device).cache_bytes


def _room(
    outline: _UnloadedModel, options: EngineOptions, device: torch.device
) -> tuple[int | None, int | None, str | None]:
    """Available bytes and the cache positions that fit, or the reason why none do."""
    if device.type == "cuda" and not torch.cuda.is_available():
        return None, None, None
    available = available_bytes(device)
    if device.type == "cpu":
        here = replace(options, memory_bytes=None, set_aside_bytes=outline.image_bytes)
    else:  # without `memory_bytes`, the weights would count as loaded
        here = replace(options, memory_bytes=int(available * (1 - LEFT_FREE)))
    try:
        return available, _plan(outline, here, device).cache_tokens, None
    except DoesNotFitError as error:
        return available, None, str(error)


def _device(name: str) -> torch.device:
    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "cpu"
    return torch.device(name)


def _number_type(device: torch.device) -> torch.dtype:
    return number_type(_DEFAULTS["dtype"].default, device)
