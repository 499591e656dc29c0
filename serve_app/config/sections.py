"""Configuration sections that others share or inherit."""

from typing import Any, Literal, Self

from pydantic import BaseModel, ConfigDict, Field, model_validator

from runtime.errors import RequestError
from serve_app.config.options import Options, read_options

Count = Field(default=None, ge=1)


class Section(BaseModel):
    """A section of the configuration. Unknown keys are errors."""

    model_config = ConfigDict(extra="forbid", frozen=True, protected_namespaces=())


class AutoscalingSettings(Section):
    """The number of replicas follows the load.

    Targets of one replica: `target_queue_s`, the time that queued prompts (of a vision encoder:
    images) take; `target_sequence_occupancy`, the share of `max_sequences` that running and waiting
    requests take; `target_kv_occupancy`, the used share of the KV cache's pages. Replicas are added
    once a target has been exceeded for `upscale_delay_s`, and stopped once fewer have been enough
    for `downscale_delay_s`; the last one is stopped after `downscale_to_zero_delay_s` without work
    (null: `downscale_delay_s`), at least 7 intervals. Replicas report every `metrics_interval_s`.
    """

    min_replicas: int = Field(default=1, ge=0)
    max_replicas: int = Field(default=1, ge=1)
    target_queue_s: float = Field(default=5.0, gt=0)
    target_sequence_occupancy: float = Field(default=0.9, gt=0, le=1)
    target_kv_occupancy: float = Field(default=0.9, gt=0, le=1)
    upscale_delay_s: float = Field(default=4.0, ge=0)
    downscale_delay_s: float = Field(default=300.0, ge=0)
    downscale_to_zero_delay_s: float | None = Field(default=None, ge=0)
    metrics_interval_s: float = Field(default=2.0, ge=0.1, le=60)

    @model_validator(mode="after")
    def _ordered(self) -> Self:
        if self.min_replicas > self.max_replicas:
            raise ValueError("min_replicas is larger than max_replicas")
        return self


class ResponseStoreSettings(Section):
    """Where responses of OpenAI's protocol are stored, to be continued or retrieved; see
    `serve_app.responses.stored_responses`.

    `replicas`: processes, of which each holds all responses. `max_bytes`: of each process;
    `tenant_bytes`: of one API key or client address in it. `max_age_s`: since a response was stored
    or last used.
    """

    replicas: int = Field(default=1, ge=1, le=8)
    max_bytes: int = Field(default=256 * 2**20, ge=2**16)
    tenant_bytes: int = Field(default=64 * 2**20, ge=2**16)
    max_age_s: float = Field(default=86_400.0, gt=0)

    @model_validator(mode="after")
    def _ordered(self) -> Self:
        if self.tenant_bytes > self.max_bytes:
            raise ValueError("tenant_bytes is larger than max_bytes")
        return self


class SpeculationSettings(Section):
    """Tokens that a step computes before they are known to follow. The answers are the same.

    `ngram`: propose what followed the last tokens where they occurred before in the conversation.
    `tokens`: of one proposal at most; fewer, or none, where they do not pay.
    """

    ngram: bool = True
    tokens: int = Field(default=8, ge=1, le=64)

    @property
    def proposed_tokens(self) -> int:
        return self.tokens if self.ngram else 0


class EngineSettings(Section):
    """How a model is computed, and default options of its requests. None: chosen from the model
    file and the machine.

    `cuda_graphs`: on a GPU, the host starts all kernels of a decode step at once.
    `target_gap_ms`: between tokens of streams, while prompts are computed (`StepBudget`).
    `state_checkpoint_bytes`: device memory for checkpoints of recurrent states. `host_cache_bytes`:
    host memory for pages that the prefix cache evicts. `max_image_pixels`
    and `max_image_frames`: limits of one image. `image_cache_bytes`: device memory for image
    features. `image_memory_bytes`: host memory for files and pixels of images, of requests and of
    recent ones that may recur. `trace`, `trace_folder`, `trace_bytes`: see
    `serve_app.replica.trace_file`; with `trace` each request is traced.
    """

    context_tokens: int | None = Field(default=None, ge=2)
    device: Literal["auto", "cpu", "cuda"] = "auto"
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = "auto"
    compute: Literal["auto", "exact", "fine", "fast"] = "auto"
    kv_dtype: Literal["auto", "float32", "bfloat16", "float16", "q8_0", "q4_0"] = "auto"
    max_sequences: int = Field(default=16, ge=1)
    max_waiting: int = Field(default=512, ge=0)
    step_tokens: int = Field(default=512, ge=1)
    target_gap_ms: float | None = Field(default=None, ge=1, le=60_000)
    cache_tokens: int | None = Count
    page_tokens: int = Field(default=16, ge=1)
    prefix_cache: bool = True
    state_checkpoint_bytes: int | None = Field(default=None, ge=0)
    host_cache_bytes: int | None = Field(default=None, ge=0)
    cuda_graphs: bool = True
    image_cache_bytes: int | None = Count
    image_memory_bytes: int | None = Count
    max_image_pixels: int = Field(default=2**26, ge=1)
    max_image_frames: int = Field(default=1000, ge=1)
    threads: int | None = Count
    speculation: SpeculationSettings = SpeculationSettings()
    trace: bool = False
    trace_folder: str | None = None
    trace_bytes: int = Field(default=64 * 2**20, ge=2**16)
    defaults: dict[str, Any] = Field(default_factory=dict)

    @model_validator(mode="after")
    def _traceable(self) -> Self:
        if self.trace_folder is not None and not self.trace_folder.startswith("/"):
            raise ValueError("trace_folder must be an absolute path, because nodes resolve it")
        if self.trace and self.trace_folder is None:
            raise ValueError("trace needs trace_folder")
        return self

    @model_validator(mode="after")
    def _known_defaults(self) -> Self:
        try:
            read_options(self.defaults)
        except RequestError as error:
            raise ValueError(f"defaults: {error}") from error
        return self

    @property
    def options(self) -> Options:
        return read_options(self.defaults)
