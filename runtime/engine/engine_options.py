"""The sizes of an engine."""

from dataclasses import dataclass

from runtime.errors import ConfigurationError
from runtime.kv.cache_types import CacheType
from runtime.worker.input_preparer import StepLimits
from runtime.worker.model import DecoderModel


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
