"""Configuration sections that other sections contain or inherit."""

from typing import Any, Literal, Self

from pydantic import BaseModel, ConfigDict, Field, field_validator, model_validator

from model_zoo.sources.reference import parse_source
from runtime.errors import RequestError, SourceError
from serve_app.config.options import Options, read_options

Count = Field(default=None, ge=1)


class Section(BaseModel):
    """A section of the configuration. Unknown keys are errors.

    The docstrings of its keys are the tables of configs/README.md (`tools.config_reference`).
    """

    model_config = ConfigDict(extra="forbid", frozen=True, protected_namespaces=())


class AutoscalingSettings(Section):
    """How the number of replicas follows the load. Targets are per replica."""

    min_replicas: int = Field(default=1, ge=0)
    """Minimum number of replicas."""
    max_replicas: int = Field(default=1, ge=1)
    """Maximum number of replicas."""
    target_queue_s: float = Field(default=5.0, gt=0)
    """Time that queued prompts take at the measured prefill speed; of a vision encoder: queued
    images."""
    target_sequence_occupancy: float = Field(default=0.9, gt=0, le=1)
    """Running and waiting requests as a share of `max_sequences`."""
    target_kv_occupancy: float = Field(default=0.9, gt=0, le=1)
    """Used share of the KV cache."""
    upscale_delay_s: float = Field(default=4.0, ge=0)
    """How long a target must be exceeded before replicas are added."""
    downscale_delay_s: float = Field(default=300.0, ge=0)
    """How long fewer replicas, at three quarters of the targets, must be enough before some are
    stopped."""
    downscale_to_zero_delay_s: float | None = Field(default=None, ge=0)
    """Time without work before the last replica is stopped, at least 7 intervals; null:
    `downscale_delay_s`."""
    metrics_interval_s: float = Field(default=2.0, ge=0.1, le=60)
    """Interval of the reports."""

    @model_validator(mode="after")
    def _ordered(self) -> Self:
        if self.min_replicas > self.max_replicas:
            raise ValueError("min_replicas is larger than max_replicas")
        return self


class ResponseStoreSettings(Section):
    """The store of responses of OpenAI's protocol, which can be continued or retrieved; see
    `serve_app.responses.stored_responses`.
    """

    replicas: int = Field(default=1, ge=1, le=8)
    """Processes, each with all responses and about 230 MB of its own."""
    max_bytes: int = Field(default=256 * 2**20, ge=2**16)
    """Limit of the responses in each process; beyond it, the least recently used ones are
    removed."""
    tenant_bytes: int = Field(default=64 * 2**20, ge=2**16)
    """The same limit for one API key or client address."""
    max_age_s: float = Field(default=86_400.0, gt=0)
    """How long a response is kept after it was stored or last used."""

    @model_validator(mode="after")
    def _ordered(self) -> Self:
        if self.tenant_bytes > self.max_bytes:
            raise ValueError("tenant_bytes is larger than max_bytes")
        return self


class SpeculationSettings(Section):
    """Speculative decoding: proposed tokens that a step verifies. The answers are the same."""

    ngram: bool = True
    """Propose by prompt lookup: the tokens that followed an earlier occurrence of the last ones in
    the conversation."""
    draft: str | None = Field(default=None, min_length=1)
    """Source of a smaller model of the same vocabulary, a draft model, that proposes tokens where
    `ngram` has none."""
    tokens: int = Field(default=8, ge=1, le=64)
    """Maximum length of one proposal; shorter ones, or none, are made where that is faster."""

    @field_validator("draft")
    @classmethod
    def _known_draft(cls, draft: str | None) -> str | None:
        try:
            if draft is not None:
                parse_source(draft)
        except SourceError as error:
            raise ValueError(str(error)) from None
        return draft

    @property
    def proposed_tokens(self) -> int:
        return self.tokens if self.ngram or self.draft is not None else 0


class EngineSettings(Section):
    """How a model is computed, and default options of its requests. None: chosen from the model
    file and the machine.
    """

    context_tokens: int | None = Field(default=None, ge=2)
    """Limit of prompt and answer together; a larger `num_ctx` of a request is clamped to it. null:
    4096, or the model's own if less."""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    """Where the model is computed: `cpu`, `cuda` or `auto`, on a GPU if the cluster has any; if
    torch cannot use that GPU, on a CPU, with a warning in the log."""
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = "auto"
    """Type of activations: `float32`, `bfloat16`, `float16` or `auto`, which is float32 on a CPU
    and bfloat16 on CUDA."""
    compute: Literal["auto", "exact", "fine", "fast"] = "auto"
    """How activations enter products with quantised weights: `exact`, in float32; `fine`, as
    integers of 15 bits per group of 32 with one scale; `fast`, of 8 bits, as in llama.cpp. On a CPU
    with AVX2, F16 and BF16 weights in a rearranged copy (`repack`) are, unless `exact`, integers of
    14 bits per group of 32 with one scale, as are the activations there: numbers from a quarter of
    the largest of a group on are kept. BF16 weights stay bfloat16 where the processor multiplies
    it: activations are then one bfloat16 with `fast`, and with AMX the sum of two with `fine`.
    Without a copy, these and other plain types are computed exactly, as are, on a CPU, those of
    IQ1, IQ2, IQ3, TQ and NVFP4. `auto` is `fine`, but on a CPU without AMX `fast` for BF16 where
    the processor multiplies bfloat16 (AVX512-BF16), and for files most of whose weights have a type
    with which `fine` computes prompts no faster than llama.cpp, or hardly: on x86-64, Q5_K and
    Q6_K, with VNNI also IQ4_XS, and without AVX512-VNNI also Q4_K. On CUDA devices, more than eight
    rows, and `exact`, are multiplied in the model's own type."""
    repack: Literal["auto", "off"] = "auto"
    """Whether weights are rearranged for a CPU: `auto` writes a copy of a file's quantised, F16
    and BF16 weights, with 16 rows interleaved, once per node into the cache directory, `tiles` in
    `$CARAVAN_CACHE` (`~/.cache/caravan`), where all processes map it; it takes as much of the disk
    as the weights. Without the space, with `compute: exact`, and for less than 64 MiB of weights,
    the file itself is used, as with `off`. Quantised weights give the same answers, F16 and BF16
    those of `compute: exact`."""
    deterministic: bool = False
    """Whether, on CUDA devices, the bits of a token's computation do not depend on the other
    requests of a step; see "The same answers in any batch". On a CPU the bits never depend on
    other requests, and the key has no effect."""
    kv_dtype: Literal["auto", "float32", "bfloat16", "float16", "q8_0", "q4_0", "fp8"] = "auto"
    """Type of the KV cache: `float32`, `float16`, `bfloat16`, `q8_0`, `q4_0` or, on CUDA devices,
    `fp8`; `auto` is float16 on a CPU (float32 for models that only embed or rank) and bfloat16 on
    CUDA. It is Ollama's `OLLAMA_KV_CACHE_TYPE`, whose `f16` is `float16`; see "Types of the KV
    cache"."""
    max_sequences: int = Field(default=16, ge=1)
    """Maximum number of running requests; further ones wait."""
    max_waiting: int = Field(default=512, ge=0)
    """Maximum number of waiting requests; further ones get 503. One client may hold at most
    as many places as remain free, so half of them (256) while it is the only one; see "Several
    clients"."""
    step_tokens: int = Field(default=512, ge=1)
    """Limit of tokens per step: larger values prefill faster, smaller ones keep streams
    steadier."""
    target_gap_ms: float | None = Field(default=None, ge=1, le=60_000)
    """While streams run, a step computes as many prompt tokens as its measured time allows within
    this gap between tokens (in most steps, at the 99th percentile; at least 16 tokens, and whole
    images that must not be divided); the steps of a draft model count, too. Prompts then start
    later. null: prompts fill `step_tokens`."""
    cache_tokens: int | None = Count
    """Capacity of the KV cache in tokens."""
    page_tokens: int = Field(default=16, ge=1)
    """Tokens per cache page."""
    prefix_cache: bool = True
    """Reuse the KV cache of common prefixes."""
    state_checkpoint_bytes: int | None = Field(default=None, ge=0)
    """Memory for copies of recurrent states (models with recurrent or convolution layers), from
    which later turns of a conversation continue; null: four per sequence, in at most an eighth
    of the cache's memory."""
    host_cache_bytes: int | None = Field(default=None, ge=0)
    """Host memory of each process for pages that the prefix cache of the device evicts, also those
    of preempted requests; they are copied back when that is faster than computing them. null: up to
    4 GiB, at most a sixteenth of what is free, for a CUDA device (rounded down to a power of two),
    0 on a CPU. It is not part of `memory_bytes`."""
    cuda_graphs: bool = True
    """Capture decode steps as CUDA graphs on a GPU, and prompts of up to 512 tokens that are alone
    in a step, unless the model has recurrent layers; neither where several devices or ranks
    compute a model, nor with cross-attention to images."""
    image_cache_bytes: int | None = Count
    """Memory for image features; null: four images of the largest size."""
    image_memory_bytes: int | None = Count
    """Host memory for the images of requests (files and pixels) and for recent images that may
    recur in the next turn; null: 1 GiB, or four images of the largest size, but at most a
    sixteenth of the free memory if that holds one. A model on a CPU subtracts it, and the memory of
    decoding, from the free memory. A request that exceeds it alone gets 400. One that does not fit
    beside others waits; the files of waiting requests may take a quarter of it in addition, others
    get 503."""
    max_image_pixels: int | None = Count
    """Limit of one image; decoding takes up to 17 bytes per pixel, for two images at a time. null:
    67,108,864, or fewer where these would take more than a quarter of the free memory, but at least
    16,777,216."""
    threads: int | None = Count
    """CPU threads; null: one for each CPU that the process may use."""
    speculation: SpeculationSettings = SpeculationSettings()
    """Speculative decoding; see "Speculation"."""
    trace: bool = False
    """Whether all requests are traced; see "Traces"."""
    trace_folder: str | None = None
    """The absolute path of the folder for traces, on the node of each replica; null: no traces."""
    trace_bytes: int = Field(default=64 * 2**20, ge=2**16)
    """Limit of a file of traces; a full file replaces its predecessor."""
    defaults: dict[str, Any] = Field(default_factory=dict)
    """Default options of requests, by Ollama's names (`temperature`, `top_k`, `num_predict`, ...),
    and `thinking_token_budget`, the tokens of thinking."""

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
