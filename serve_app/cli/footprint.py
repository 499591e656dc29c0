"""What memory a model needs, planned as for serving it, from the headers of its file alone."""

from dataclasses import dataclass, replace

import torch

from model_zoo.gguf.scope import META, TensorScope
from model_zoo.registry import class_for
from runtime.assembly import EngineOptions, check_options
from runtime.errors import DoesNotFitError
from runtime.kv.spec import CacheLayout
from runtime.memory import LEFT_FREE, MemoryPlan, available_bytes, plan_memory
from runtime.model import DecoderModel
from serve_app.cli.facts import ModelFacts
from serve_app.loading import DEFAULT_CONTEXT_TOKENS, usable_cpus
from serve_app.settings import ModelSettings

_NO_LIMIT = 1 << 62
# A plan counts through the positions of a sliding window; a file may state any context.
_LONGEST_WHOLE_CONTEXT = 1 << 21
_DEFAULTS = ModelSettings.model_fields


@dataclass(frozen=True, slots=True)
class Footprint:
    """Bytes for `slots` requests at once, each with a whole context of `context_tokens`.

    `least_bytes`: with a cache of one context, below which nothing starts. `whole_context_`: the
    longest that the model was made for, and the cache for one request of it. `available_bytes` and
    `cache_tokens`, the positions that this machine has room for, None where it has no such device;
    `refusal`: why it cannot be served here.
    """

    device: str
    slots: int
    context_tokens: int
    kv_dtype: str
    weight_bytes: int
    cache_bytes: int
    activation_bytes: int
    sampler_bytes: int
    total_bytes: int
    least_bytes: int
    whole_context_tokens: int
    whole_context_cache_bytes: int | None
    available_bytes: int | None
    cache_tokens: int | None
    refusal: str | None


def footprint(
    facts: ModelFacts, *, context_tokens: int | None, slots: int | None, device: str
) -> Footprint:
    """As `serve` would plan it; None means the default of the settings.

    ConfigurationError when the model has no such context, ModelFileError when it is not served.
    """
    where = _device(device)
    decoder = _outline(facts, where)
    most = decoder.context_length
    options = EngineOptions(
        context_tokens=context_tokens or min(DEFAULT_CONTEXT_TOKENS, most),
        max_sequences=slots or _DEFAULTS["max_sequences"].default,
        step_tokens=max(slots or 0, _DEFAULTS["step_tokens"].default),
        page_tokens=_DEFAULTS["page_tokens"].default,
        kv_dtype=_dtype(where),
    )
    check_options(options, decoder)
    full = _plan(decoder, options, where)
    least = _plan(decoder, options, where, cache_tokens=options.context_tokens)
    available, held, refusal = _room(decoder, options, where)
    return Footprint(
        device=where.type,
        slots=options.max_sequences,
        context_tokens=options.context_tokens,
        kv_dtype=str(options.kv_dtype).removeprefix("torch."),
        weight_bytes=full.weight_bytes,
        cache_bytes=full.cache_bytes,
        activation_bytes=full.activation_bytes,
        sampler_bytes=full.sampler_bytes,
        total_bytes=_needed(full),
        least_bytes=_needed(least),
        whole_context_tokens=most,
        whole_context_cache_bytes=_whole_context_bytes(decoder, options, where),
        available_bytes=available,
        cache_tokens=held,
        refusal=refusal,
    )


def _outline(facts: ModelFacts, device: torch.device) -> DecoderModel:
    """The decoder without its weights: on a CPU they are views of a map that nobody reads.

    Elsewhere they would be copied; the device "meta" stands in for it.
    """
    decoder_class = class_for(facts.metadata)
    dtype = _dtype(device)
    draft = TensorScope(facts.file, device=META, dtype=dtype)
    decoder = decoder_class(draft, facts.metadata)
    draft.check()
    if device.type != "cpu":
        return decoder
    torch.set_num_threads(usable_cpus())
    return decoder_class(TensorScope(facts.file, device=device, dtype=dtype), facts.metadata)


def _plan(
    decoder: DecoderModel,
    options: EngineOptions,
    device: torch.device,
    *,
    cache_tokens: int | None = None,
    memory_bytes: int = _NO_LIMIT,
) -> MemoryPlan:
    return plan_memory(
        decoder,
        CacheLayout.of(decoder.cache_layers, page_tokens=options.page_tokens),
        device=device,
        kv_dtype=options.kv_dtype,
        slots=options.max_sequences,
        step_tokens=options.step_tokens,
        context_tokens=options.context_tokens,
        cache_tokens=cache_tokens,
        memory_bytes=memory_bytes,
    )


def _whole_context_bytes(
    decoder: DecoderModel, options: EngineOptions, device: torch.device
) -> int | None:
    most = decoder.context_length
    if most > _LONGEST_WHOLE_CONTEXT:
        return None
    alone = replace(options, context_tokens=most, max_sequences=1)
    return _plan(decoder, alone, device).cache_bytes


def _room(
    decoder: DecoderModel, options: EngineOptions, device: torch.device
) -> tuple[int | None, int | None, str | None]:
    """What is available here, how many positions the cache may then hold, and if none why."""
    if device.type == "cuda" and not torch.cuda.is_available():
        return None, None, None
    available = available_bytes(device)
    try:
        plan = _plan(decoder, options, device, memory_bytes=int(available * (1 - LEFT_FREE)))
    except DoesNotFitError as error:
        return available, None, str(error)
    return available, plan.cache_tokens, None


def _needed(plan: MemoryPlan) -> int:
    return plan.available_bytes - plan.headroom_bytes


def _device(name: str) -> torch.device:
    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "cpu"
    return torch.device(name)


def _dtype(device: torch.device) -> torch.dtype:
    """What `auto` means in the settings, for weights that are computed with and for the cache."""
    return torch.float32 if device.type == "cpu" else torch.bfloat16
