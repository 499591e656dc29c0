"""The application's configuration: the `args` of a Serve config file."""

import difflib
import re
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Annotated, Any, Literal, Self

from pydantic import (
    BaseModel,
    Field,
    ValidationError,
    ValidationInfo,
    field_validator,
    model_validator,
)

from model_zoo.gguf.adapter_path import MAX_ADAPTERS
from model_zoo.sources.reference import HubSource, PathSource, Source, parse_source
from runtime.errors import ConfigurationError, SourceError
from runtime.home_directory import expanded
from serve_app.config.on_demand_settings import OnDemandModelSettings, OnDemandSettings
from serve_app.config.sections import (
    AutoscalingSettings,
    Count,
    EngineSettings,
    ResponseStoreSettings,
    Section,
    SpeculationSettings,
)
from serve_app.config.wrong_values import repeats, requirement, shown, spelled

NAME_PATTERN = r"^[A-Za-z0-9_][A-Za-z0-9_.\-/]*(:[A-Za-z0-9_][A-Za-z0-9_.\-]*)?$"
# Largest file that the image decoders accept.
MAX_IMAGE_BYTES = 32 * 2**20
MAX_RANKS = 256
MAX_FETCH_S = 300.0  # upper limit of the timeout for fetching an image by URL
_NAME = r"(\*\.)?[A-Za-z0-9_]([A-Za-z0-9._\-]*[A-Za-z0-9_])?"
HOST_NAME_PATTERN = rf"^(\*|{_NAME})$"
ORIGIN_PATTERN = (
    rf"^(\*|[a-z][a-z0-9+.\-]*://(\*|({_NAME}|\[[0-9A-Fa-f:.]+\])(:([0-9]{{1,5}}|\*))?))$"
)
HOST_PATTERN = (
    r"^((\*\.)?[A-Za-z0-9_]([A-Za-z0-9._\-]*[A-Za-z0-9_])?|\[[0-9A-Fa-f:.]+\])(:[0-9]{1,5})?$"
)
_NAME_OF_MODEL = spelled(
    NAME_PATTERN,
    "a name such as qwen3 or org/qwen3:4b: letters, digits, _, ., - and /, beginning with a letter,"
    " a digit or _, and at most one tag behind a colon",
)
_HOST = spelled(
    HOST_PATTERN,
    "a host such as example.org, *.example.org or [::1]:8080, without https:// and path",
)


class ImageUrlSettings(Section):
    """Fetching of images by URL; without these settings it is refused."""

    allowed_hosts: tuple[Annotated[str, _HOST], ...] = Field(min_length=1)
    """Names or addresses of hosts: `*.name` for all subdomains, `:port` for another port than the
    scheme's default."""
    max_bytes: int = Field(default=8 * 2**20, ge=1, le=MAX_IMAGE_BYTES)
    """Limit of one image."""
    timeout_s: float = Field(default=10.0, gt=0, le=MAX_FETCH_S)
    """Time limit of one image, including redirects."""
    max_redirects: int = Field(default=3, ge=0, le=20)
    """Limit of redirects, each of which must lead to an allowed host."""
    allow_private: bool = False
    """Whether private and loopback addresses are permitted; use it only for your own hosts."""


class FailoverSettings(Section):
    """Failover of requests to other replicas."""

    max_retries: int = Field(default=2, ge=0)
    """How many replicas a request may lose in a row without progress (three new tokens); in total
    it may lose five times as many. 0: the loss of a replica fails all its requests."""
    silence_s: float = Field(default=10.0, ge=3)
    """Time without a heartbeat, sent every second, after which a replica counts as lost. A lost
    host is noticed after 3 s."""


class VisionSettings(Section):
    """Where a model's images are encoded. All keys except `placement` configure a pool."""

    placement: Literal["auto", "local", "pool"] = "auto"
    """`local`, in each replica, or `pool`, by separate encoders that all replicas share; `auto` is
    `pool` if any other key is given."""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    """`cpu`, `cuda` or `auto`, which is CUDA if `num_gpus` is given."""
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = "auto"
    """As for models: `auto`, `float32`, `bfloat16` or `float16`."""
    replicas: int | None = Count
    """Fixed number of encoders."""
    autoscaling: AutoscalingSettings | None = None
    """As for models; `target_queue_s` is the time that queued images take."""
    num_cpus: float | None = Field(default=None, ge=0)
    """CPUs that Ray reserves for an encoder; null: 1."""
    num_gpus: float | None = Field(default=None, ge=0)
    """GPUs that Ray reserves for an encoder; null: one if `device` is cuda, else none."""
    threads: int | None = Count
    """CPU threads of an encoder, as for models."""
    memory_bytes: int | None = Count
    """As for models."""
    cache_bytes: int | None = Count
    """Host memory of an encoder for cached features; null: 16 images of the largest size."""
    batch_images: int | None = Count
    """Maximum number of waiting images of equal size that are encoded together; null: 1 on a CPU,
    4 on CUDA."""
    timeout_s: float = Field(default=120.0, gt=0)
    """How long an image of a request may be without an encoder that answers, before the request
    fails. Time in the queue of an encoder does not count."""

    @model_validator(mode="after")
    def _consistent(self) -> Self:
        given = sorted(self.model_fields_set - {"placement"})
        if self.placement == "local" and given:
            raise ValueError(f"placement is local, but {given[0]} configures a pool; remove one")
        if self.autoscaling is not None and self.replicas is not None:
            raise ValueError("replicas and autoscaling exclude each other")
        return self

    @property
    def pooled(self) -> bool:
        return self.placement == "pool" or bool(self.model_fields_set - {"placement"})

    @property
    def encoder(self) -> "VisionSettings":
        """Only the settings of the encoders, which are equal for models that can share encoders."""
        return self.model_copy(update={"placement": "pool", "timeout_s": 0.0})

    @property
    def computing_device(self) -> str:
        return ("cuda" if self.num_gpus else "cpu") if self.device == "auto" else self.device


class ParallelSettings(Section):
    """Tensor parallelism of each replica."""

    tensor: int = Field(default=1, ge=1, le=MAX_RANKS)
    """The number of processes of a replica, each with a part of every large matrix and of the KV
    cache."""
    placement: Literal["pack", "spread", "strict_pack", "strict_spread"] = "pack"
    """Ray's placement strategy for these processes: `pack`, on few nodes, `spread`, on many, or
    strictly so, `strict_pack` and `strict_spread`."""


class AdapterSettings(Section):
    """A LoRA adapter of a model."""

    source: str = Field(min_length=1)
    """The path of a GGUF file or `hf://org/repo/file.gguf`."""
    scale: float = Field(default=1.0, allow_inf_nan=False)
    """Factor of the adapter's changes."""

    @field_validator("source")
    @classmethod
    def _known_source(cls, source: str) -> str:
        return _single_file(source)


class ModelSettings(EngineSettings):
    """One configured model. None: chosen from the model file and the machine."""

    name: Annotated[str, _NAME_OF_MODEL]
    """The name in requests."""
    source: str = Field(min_length=1)
    """The path of a GGUF file, `hf://…` or `ollama://…`."""
    projector: str | None = None
    """The file of the vision model, if it is separate: a path or `hf://org/repo/file.gguf`; a
    pulled model's own projector is used by default."""
    adapters: tuple[AdapterSettings, ...] | None = Field(default=None, max_length=MAX_ADAPTERS)
    """LoRA adapters instead of the model's own, up to 16; [] for none."""
    system: str | None = None
    """System prompt of conversations without a system message; "" disables the model's own."""
    vision: VisionSettings = VisionSettings()
    """Where images are encoded; see "Vision encoders"."""
    memory_bytes: int | None = Count
    """Memory limit of the engine, without the images of requests."""
    num_cpus: float | None = Field(default=None, ge=0)
    """CPUs that Ray reserves for a replica; null: 1."""
    num_gpus: float | None = Field(default=None, ge=0)
    """GPUs that Ray reserves for a replica; null: as many as it uses."""
    replicas: int | None = Count
    """Fixed number of replicas."""
    autoscaling: AutoscalingSettings | None = None
    """A number of replicas that follows the load; see "Autoscaling"."""
    parallel: ParallelSettings = ParallelSettings()
    """Tensor parallelism; see "Models larger than a device"."""
    tensor_split: tuple[Annotated[float, Field(ge=0)], ...] | None = Field(
        default=None, min_length=1
    )
    """Shares of the layers on several GPUs of one process; see "Models larger than a device"."""
    num_gpu: int | None = Field(default=None, ge=0)
    """Number of layers on GPUs, which are the last ones; the host computes the others. null: as
    many as fit."""
    main_gpu: int = Field(default=0, ge=0)
    """The GPU for models that fit on one."""
    spm_infill: bool = False
    """Whether prompts with a `suffix` have their tokens in the order suffix, prefix, answer instead
    of prefix, suffix, answer; as llama.cpp's option of this name."""

    @field_validator("source")
    @classmethod
    def _known_source(cls, source: str) -> str:
        _parsed(source)
        return source

    @field_validator("projector")
    @classmethod
    def _known_projector(cls, projector: str | None) -> str | None:
        return None if projector is None else _single_file(projector)

    @model_validator(mode="after")
    def _consistent(self) -> Self:
        if self.autoscaling is not None and self.replicas is not None:
            raise ValueError("replicas and autoscaling exclude each other")
        if self.tensor_split is not None and not sum(self.tensor_split):
            raise ValueError("tensor_split needs a number above 0")
        layer_keys = sorted(self.model_fields_set & {"tensor_split", "num_gpu", "main_gpu"})
        if layer_keys and self.parallel.tensor > 1:
            raise ValueError(f"parallel.tensor and {layer_keys[0]} exclude each other")
        drafts = self.speculation.draft is not None
        divided = "parallel.tensor" if self.parallel.tensor > 1 else next(iter(layer_keys), None)
        if drafts and divided not in (None, "main_gpu"):
            raise ValueError(f"speculation.draft and {divided} exclude each other")
        if layer_keys and self.device == "cpu":
            raise ValueError(f"device is cpu, but {layer_keys[0]} is for GPUs; remove one")
        return self

    @property
    def computing_device(self) -> str:
        return "cpu" if self.num_gpu == 0 else self.device

    @property
    def is_a_path(self) -> bool:
        """Whether `source` is a file; other models are in a store, and may have parameters."""
        return isinstance(parse_source(self.source), PathSource)


class AppSettings(Section):
    """The whole application."""

    on_demand: OnDemandSettings | None = None
    """If given, all other models of the store are loaded on demand; see "Models on demand"."""
    models: tuple[ModelSettings, ...] = Field(default=(), validate_default=True)
    """Configured models, each with the keys below; at least one is required without `on_demand`."""
    manage_models: bool | None = None
    """Whether clients may pull, push, create, copy and delete models; null: only with API keys; see
    "Who may manage models"."""
    api_keys_file: str | None = Field(default=None, min_length=1)
    """A file of API keys; if given, requests need one; see "API keys and limits"."""
    concurrent_requests: int | None = Field(default=256, ge=1)
    """Concurrent requests of an API key without its own limit or, without keys, of a client
    address; more get 429; null: unlimited."""
    share_caches: bool = False
    """Whether all API keys share cached prompts and images; see "Several clients"."""
    trace_without_keys: bool = False
    """Without API keys: whether any client may have its requests traced; see "Traces"."""
    allowed_origins: tuple[str, ...] = ()
    """Web origins that may use the server besides local ones: `https://chat.example.org`,
    `https://*.example.org:*`, `chrome-extension://ID`, `*`; see "Browsers"."""
    allowed_hosts: tuple[str, ...] | None = None
    """Host names of this server (`llm.example.org`, `*.example.org`, `*` for any) besides local
    ones; null: only local ones, or any with API keys; see "Without API keys"."""
    ingress_replicas: int = Field(default=1, ge=1)
    """HTTP processes. Each remembers which replica has which prompts, in up to 132 MB."""
    max_body_bytes: int = Field(default=32 * 2**20, ge=1024, le=128 * 2**20)
    """Limit of a request body, at most 128 MiB."""
    max_text_bytes: int = Field(default=8 * 2**20, ge=1024, le=32 * 2**20)
    """Limit of a request body without its images, at most 32 MiB; see "Request bodies"."""
    body_budget_bytes: int | None = Field(default=None, ge=1024)
    """Limit of all bodies that one process receives and decodes at a time; null: eight times
    `max_body_bytes`."""
    strict_fields: bool = False
    """Refuse requests with unknown fields or options (400) instead of ignoring these as Ollama and
    vLLM do."""
    max_images: int = Field(default=16, ge=0)
    """Limit of images per request. With `truncation: auto` of `/v1/responses`, the oldest turns are
    left out instead."""
    max_image_bytes: int = Field(default=16 * 2**20, ge=1, le=MAX_IMAGE_BYTES)
    """Limit of one image file, at most 32 MiB; all images of a request: 96 MiB."""
    image_urls: ImageUrlSettings | None = None
    """If given, `image_url` may be a URL of the allowed hosts."""
    start_timeout_s: float = Field(default=60.0, gt=0)
    """How long a request, or a stream that has lost its replica, waits for a replica to start; with
    `autoscaling`, how long a starting replica delays decisions."""
    failover: FailoverSettings = FailoverSettings()
    """Failover of requests to other replicas."""
    responses: ResponseStoreSettings | None = ResponseStoreSettings()
    """The store, in memory, of responses of `/v1/responses`. null: nothing is stored."""

    @model_validator(mode="before")
    @classmethod
    def _no_plain_keys(cls, raw: Any) -> Any:
        """Refuses keys in `args`, which Ray writes to its logs, dashboard and state."""
        if "api_keys" in raw:
            raise ValueError(
                "api_keys is not allowed here, because Ray's logs would show it; use "
                "`api_keys_file` or the environment variable CARAVAN_API_KEYS, with entries from "
                "`caravan key new NAME`"
            )
        return raw

    @field_validator("allowed_origins")
    @classmethod
    def _origins(cls, origins: tuple[str, ...]) -> tuple[str, ...]:
        for origin in origins:
            if not re.fullmatch(ORIGIN_PATTERN, origin):
                raise ValueError(
                    f"{origin!r} is not an origin such as https://chat.example.org without a path, "
                    "https://*.example.org:*, chrome-extension://* or *"
                )
        return origins

    @field_validator("allowed_hosts")
    @classmethod
    def _host_names(cls, hosts: tuple[str, ...] | None) -> tuple[str, ...] | None:
        for host in hosts or ():
            if not re.fullmatch(HOST_NAME_PATTERN, host):
                raise ValueError(
                    f"{host!r} is not a host name such as llm.example.org without a port, "
                    "*.example.org or *"
                )
        return hosts

    @field_validator("models")
    @classmethod
    def _unique_names(
        cls, models: tuple[ModelSettings, ...], others: ValidationInfo
    ) -> tuple[ModelSettings, ...]:
        if not models and others.data.get("on_demand") is None:
            raise ValueError("at least one model or `on_demand` is required")
        seen: set[str] = set()
        for model in models:
            names = {deployment_name(model.name), deployment_name(canonical_name(model.name))}
            if names & seen:
                raise ValueError(
                    f'two models have the name "{model.name}" or names that differ only in spelling'
                )
            seen |= names
        return models

    @field_validator("manage_models")
    @classmethod
    def _manageable(cls, manage: bool | None, others: ValidationInfo) -> bool | None:
        if manage and others.data.get("on_demand") is None:
            raise ValueError("there is no `on_demand`, and only its models can be managed")
        return manage

    def caches_are_private(self, *, keyed: bool) -> bool:
        """Whether each tenant has its own caches. `keyed`: whether the server has API keys."""
        return keyed and not self.share_caches

    def models_are_managed(self, *, keyed: bool) -> bool:
        """Whether clients may manage models. `keyed`: whether the server has API keys."""
        allowed = keyed if self.manage_models is None else self.manage_models
        return allowed and self.on_demand is not None


def canonical_name(name: str) -> str:
    """The name in lower case and without the tag `latest`: equal for spellings of one name."""
    return name.lower().removesuffix(":latest")


def deployment_name(name: str) -> str:
    """The model's name with the characters that Serve accepts."""
    return re.sub(r"[^A-Za-z0-9_.-]", "_", name)


def read_settings(args: Mapping[str, Any]) -> AppSettings:
    """The checked settings. ConfigurationError names each invalid key and the reason."""
    if not isinstance(args, Mapping):
        raise ConfigurationError(f"Configuration: args must be an object, not {shown(args)}")
    try:
        return AppSettings.model_validate(dict(args))
    except ValidationError as error:
        lines = [_line(dict(each), args) for each in error.errors() if not repeats(each)]
        raise ConfigurationError("Configuration: " + "; ".join(lines)) from None


def source_path(source: str) -> Path:
    """A path, relative to the working directory of `serve run`.

    Symbolic links are not resolved: the parts of a split file are found by the configured name.
    """
    return expanded(source).absolute()


def _parsed(source: str) -> Source:
    try:
        return parse_source(source)
    except SourceError as error:
        raise ValueError(str(error)) from None


def _single_file(text: str) -> str:
    source = _parsed(text)
    if not isinstance(source, PathSource) and not (isinstance(source, HubSource) and source.file):
        raise ValueError("must be the path of a file or hf://org/repo/file.gguf")
    return text


def _line(details: dict[str, Any], args: Mapping[str, Any]) -> str:
    location = details["loc"]
    place = "args" + "".join(f"[{p}]" if isinstance(p, int) else f".{p}" for p in location)
    name = _model_name(location, args)
    place = f"{place} (model {name})" if name else place
    if details["type"] == "extra_forbidden":
        return f"{place} is not a known key{_nearest(location)}"
    if details["type"] == "string_unicode":
        return f"{place} is not UTF-8"
    if details["type"] == "missing":
        return f"{place} is missing"
    if (required := requirement(details)) is not None:
        return f"{place} must be {required}, not {shown(details['input'])}"
    message = details["msg"].removeprefix("Value error, ")
    return f"{place}: {message[:1].lower()}{message[1:]}"


def _model_name(location: tuple[int | str, ...], args: Mapping[str, Any]) -> str | None:
    if len(location) < 2 or location[0] != "models" or not isinstance(location[1], int):
        return None
    model = args["models"][location[1]]
    return model.get("name") if isinstance(model, Mapping) else None


def _nearest(location: tuple[int | str, ...]) -> str:
    names = [part for part in location if isinstance(part, str)]
    owners: dict[str, type[BaseModel]] = {
        "adapters": AdapterSettings,
        "autoscaling": AutoscalingSettings,
        "failover": FailoverSettings,
        "image_urls": ImageUrlSettings,
        "model": OnDemandModelSettings,
        "models": ModelSettings,
        "on_demand": OnDemandSettings,
        "parallel": ParallelSettings,
        "responses": ResponseStoreSettings,
        "speculation": SpeculationSettings,
        "vision": VisionSettings,
    }
    owner = owners.get(names[-2], AppSettings) if len(names) > 1 else AppSettings
    nearest = partial(difflib.get_close_matches, names[-1], owner.model_fields, n=1)
    if close := nearest(cutoff=0.85):
        return f"; did you mean {close[0]}?"
    for section, inner in owners.items():
        if section in owner.model_fields and names[-1] in inner.model_fields:
            return f"; it belongs to `{section}`"
    return f"; did you mean {close[0]}?" if (close := nearest(cutoff=0.4)) else ""
