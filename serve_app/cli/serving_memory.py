"""The memory that serving a model needs, planned from the headers of its files."""

from dataclasses import dataclass, replace

import torch

from runtime.engine.memory_plan import LEFT_FREE, available_bytes
from runtime.errors import DoesNotFitError
from runtime.host_limits import usable_cpus
from runtime.kernels.native import needs_compiling
from serve_app.cli.terminal import print_note
from serve_app.config.settings import ModelSettings
from serve_app.replica.loading import plan_model
from serve_app.replica.model_files import ModelFiles
from serve_app.replica.model_plan import ModelPlan

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


def serving_memory(
    files: ModelFiles, *, context_tokens: int | None, slots: int | None, device: str
) -> ServingMemory:
    """Plans the memory as for serving; None means the default of the settings.

    ConfigurationError for a longer context than the model's, an unsuitable projector or an
    unsuitable draft model, ModelFileError for a model that is not supported.
    """
    where = _device(device)
    plan = plan_model(_settings(files, context_tokens, slots), files, where)
    options, decoder = plan.options, plan.model.decoder
    full = plan.memory(options)
    available, held, refusal = _room(plan)
    return ServingMemory(
        device=where.type,
        slots=options.max_sequences,
        context_tokens=options.context_tokens,
        kv_dtype=options.kv_dtype.value,
        weight_bytes=full.weight_bytes,
        vision_weight_bytes=full.weight_bytes - decoder.weight_bytes,
        cache_bytes=full.cache_bytes,
        activation_bytes=full.activation_bytes,
        vision_bytes=full.vision_bytes,
        sampler_bytes=full.sampler_bytes,
        draft_bytes=full.draft_bytes,
        total_bytes=full.reserved_bytes,
        least_bytes=full.least_bytes,
        whole_context_tokens=decoder.context_length,
        whole_context_cache_bytes=_whole_context_bytes(plan),
        available_bytes=available,
        cache_tokens=held,
        refusal=refusal,
        projector_left_alone=_left_alone(plan.files),
    )


def _settings(files: ModelFiles, context_tokens: int | None, slots: int | None) -> ModelSettings:
    slots = slots or _DEFAULTS["max_sequences"].default
    return ModelSettings(
        name="shown",
        source=str(files.path),
        context_tokens=context_tokens,
        max_sequences=slots,
        step_tokens=max(slots, _DEFAULTS["step_tokens"].default),
        memory_bytes=_NO_LIMIT,
    )


def _left_alone(files: ModelFiles) -> str | None:
    """Why the model's own projector is not used."""
    reasons = (each.partition(": ") for each in files.unused)
    return next((reason for what, _, reason in reasons if what == "projector"), None)


def _whole_context_bytes(plan: ModelPlan) -> int | None:
    most = plan.model.decoder.context_length
    if most > _MAX_WHOLE_CONTEXT:
        return None
    return plan.memory(replace(plan.options, context_tokens=most, max_sequences=1)).cache_bytes


def _room(plan: ModelPlan) -> tuple[int | None, int | None, str | None]:
    """Available bytes and the cache positions that fit, or the reason why none do."""
    device = plan.device
    if device.type == "cuda" and not torch.cuda.is_available():
        return None, None, None
    available = available_bytes(device)
    # Without `memory_bytes`, the weights would count as loaded on a GPU.
    limit = None if device.type == "cpu" else int(available * (1 - LEFT_FREE))
    try:
        here = plan.memory(replace(plan.options, memory_bytes=limit))
        return available, here.cache_tokens, None
    except DoesNotFitError as error:
        return available, None, str(error)


def _device(name: str) -> torch.device:
    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "cpu"
    if name == "cpu":
        torch.set_num_threads(usable_cpus())
        if needs_compiling():
            print_note("compiling the CPU kernels, once for this instruction set and their version")
    return torch.device(name)
