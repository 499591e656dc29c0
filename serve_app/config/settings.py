"""The application's configuration: the `args` of a Serve config file, checked before any start."""

import difflib
import re
from collections.abc import Mapping
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

from model_zoo.sources.reference import HubSource, PathSource, Source, parse_source
from runtime.errors import ConfigurationError, SourceError
from serve_app.config.sections import AutoscalingSettings, Count, EngineSettings, Section
from serve_app.gateway.failover import FailoverRules
from serve_app.on_demand.settings import OnDemandModelSettings, OnDemandSettings

NAME_PATTERN = r"^[A-Za-z0-9_][A-Za-z0-9_.\-/]*(:[A-Za-z0-9_][A-Za-z0-9_.\-]*)?$"
# What decoders accept of a single file.
MAX_IMAGE_BYTES = 32 * 2**20
MAX_RANKS = 256
MAX_FETCH_S = 300.0  # of an image by URL
_NAME = r"(\*\.)?[A-Za-z0-9_]([A-Za-z0-9._\-]*[A-Za-z0-9_])?"
HOST_NAME_PATTERN = rf"^(\*|{_NAME})$"
ORIGIN_PATTERN = (
    rf"^(\*|[a-z][a-z0-9+.\-]*://(\*|({_NAME}|\[[0-9A-Fa-f:.]+\])(:([0-9]{{1,5}}|\*))?))$"
)
HOST_PATTERN = (
    r"^((\*\.)?[A-Za-z0-9_]([A-Za-z0-9._\-]*[A-Za-z0-9_])?|\[[0-9A-Fa-f:.]+\])(:[0-9]{1,5})?$"
)


class ImageUrlSettings(Section):
    """Images that are fetched for requests, and from where; without these settings none are.

    `allowed_hosts`: names or addresses, `*.name` for all names below it, each with `:port` for
    another port than the scheme's own. `timeout_s` is for all of one image. `allow_private` lets
    hosts of this network and this machine be asked; it is meant for tests.
    """

    allowed_hosts: tuple[Annotated[str, Field(pattern=HOST_PATTERN)], ...] = Field(min_length=1)
    max_bytes: int = Field(default=8 * 2**20, ge=1, le=MAX_IMAGE_BYTES)
    timeout_s: float = Field(default=10.0, gt=0, le=MAX_FETCH_S)
    max_redirects: int = Field(default=3, ge=0, le=20)
    allow_private: bool = False


class FailoverSettings(Section):
    """How requests go on when replicas are lost.

    `max_retries`: how many replicas one request may lose while they are at work on it. `silence_s`:
    after so long without a sign of life a replica counts as lost; it gives one every second.
    """

    max_retries: int = Field(default=2, ge=0)
    silence_s: float = Field(default=10.0, ge=3)

    @property
    def rules(self) -> FailoverRules:
        return FailoverRules(self.max_retries, self.silence_s)


class VisionSettings(Section):
    """Where a model's images are encoded.

    `placement`: "local" in each of its replicas, "pool" by encoders of their own, which all
    replicas share; "auto" is "pool" once anything is said of these. `timeout_s` is what an image
    may take there, all included; it ends before an engine that waits for it counts as dead. The
    others are an encoder's: `replicas` of it, or `autoscaling` by how long images queue; `device`
    auto is CUDA where `num_gpus` are given; `cache_bytes` are for features that it keeps,
    `batch_images` at most are encoded in one call.
    """

    placement: Literal["auto", "local", "pool"] = "auto"
    device: Literal["auto", "cpu", "cuda"] = "auto"
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = "auto"
    replicas: int | None = Count
    autoscaling: AutoscalingSettings | None = None
    num_cpus: float | None = Field(default=None, ge=0)
    num_gpus: float | None = Field(default=None, ge=0)
    threads: int | None = Count
    memory_bytes: int | None = Count
    cache_bytes: int | None = Count
    batch_images: int | None = Count
    timeout_s: float = Field(default=120.0, gt=0, le=280)

    @model_validator(mode="after")
    def _consistent(self) -> Self:
        given = sorted(self.model_fields_set - {"placement"})
        if self.placement == "local" and given:
            raise ValueError(f"placement is local, but {given[0]} is for a pool; leave out one")
        if self.autoscaling is not None and self.replicas is not None:
            raise ValueError("replicas and autoscaling exclude each other")
        return self

    @property
    def pooled(self) -> bool:
        return self.placement == "pool" or bool(self.model_fields_set - {"placement"})

    @property
    def encoder(self) -> "VisionSettings":
        """What is said of the encoders alone: equal for models that may share theirs."""
        return self.model_copy(update={"placement": "pool", "timeout_s": 0.0})

    @property
    def computing_device(self) -> str:
        return ("cuda" if self.num_gpus else "cpu") if self.device == "auto" else self.device


class ParallelSettings(Section):
    """How many processes compute each replica of a model, on as many devices.

    `tensor`: ranks that have a part of each large matrix and of the cache. `placement`: how Ray
    places them: on as few nodes as it can, on as many, or strictly so.
    """

    tensor: int = Field(default=1, ge=1, le=MAX_RANKS)
    placement: Literal["pack", "spread", "strict_pack", "strict_spread"] = "pack"


class ModelSettings(EngineSettings):
    """One served model. None means: decided from the model file and the machine.

    `system`: for conversations that bring none; "" for none, even where the model has its own.
    `tensor_split`, `num_gpu`, `main_gpu`: how one process divides layers among GPUs and the host;
    see `serve_app.replica.device_map.DeviceMapOptions`.
    """

    name: str = Field(pattern=NAME_PATTERN)
    source: str = Field(min_length=1)
    projector: str | None = None
    system: str | None = None
    vision: VisionSettings = VisionSettings()
    memory_bytes: int | None = Count
    num_cpus: float | None = Field(default=None, ge=0)
    num_gpus: float | None = Field(default=None, ge=0)
    replicas: int | None = Count
    autoscaling: AutoscalingSettings | None = None
    parallel: ParallelSettings = ParallelSettings()
    tensor_split: tuple[Annotated[float, Field(ge=0)], ...] | None = Field(None, min_length=1)
    num_gpu: int | None = Field(default=None, ge=0)
    main_gpu: int = Field(default=0, ge=0)

    @field_validator("source")
    @classmethod
    def _known_source(cls, source: str) -> str:
        _parsed(source)
        return source

    @field_validator("projector")
    @classmethod
    def _known_projector(cls, projector: str | None) -> str | None:
        source = None if projector is None else _parsed(projector)
        named = source is None or isinstance(source, PathSource)
        if not named and not (isinstance(source, HubSource) and source.file):
            raise ValueError("it must be the path of a file, or hf://org/repo/file.gguf")
        return projector

    @model_validator(mode="after")
    def _consistent(self) -> Self:
        if self.autoscaling is not None and self.replicas is not None:
            raise ValueError("replicas and autoscaling exclude each other")
        if self.tensor_split is not None and not sum(self.tensor_split):
            raise ValueError("tensor_split needs a number above 0")
        staged = sorted(self.model_fields_set & {"tensor_split", "num_gpu", "main_gpu"})
        if staged and self.parallel.tensor > 1:
            raise ValueError(f"parallel.tensor and {staged[0]} exclude each other")
        if staged and self.device == "cpu":
            raise ValueError(f"device is cpu, but {staged[0]} is for GPUs; leave out one")
        return self

    @property
    def computing_device(self) -> str:
        return "cpu" if self.num_gpu == 0 else self.device

    @property
    def brings_options(self) -> bool:
        """Whether the model may have parameters of its own."""
        return not isinstance(parse_source(self.source), PathSource)


class AppSettings(Section):
    """The whole application. `max_images` is of one request. `strict_fields`: whether requests are
    refused for fields and options that are not known, instead of these being ignored.

    `manage_models`: whether clients may pull, create, copy and delete models; None: where there are
    API keys. `api_keys_file`: see `serve_app.api.keys`. `concurrent_requests`: of an API key that
    states no limit of its own or, without keys, of a client address. `allowed_origins`: of web
    pages that may use the server, beside those of the browser's own machine. `allowed_hosts`: names
    of the server, beside names that outsiders cannot register; None: these alone, or any where
    there are API keys. See `serve_app.api.cross_site`. `share_caches`: whether the holders of API
    keys share cached prefixes and images. `max_text_bytes`, `body_budget_bytes`: see
    `serve_app.api.bodies.BodyLimits`.
    """

    on_demand: OnDemandSettings | None = None
    models: tuple[ModelSettings, ...] = Field(default=(), validate_default=True)
    manage_models: bool | None = None
    api_keys_file: str | None = Field(default=None, min_length=1)
    concurrent_requests: int | None = Field(default=256, ge=1)
    share_caches: bool = False
    allowed_origins: tuple[str, ...] = ()
    allowed_hosts: tuple[str, ...] | None = None
    ingress_replicas: int = Field(default=1, ge=1)
    max_body_bytes: int = Field(default=32 * 2**20, ge=1024, le=128 * 2**20)
    max_text_bytes: int = Field(default=8 * 2**20, ge=1024, le=32 * 2**20)
    body_budget_bytes: int | None = Field(default=None, ge=1024)
    strict_fields: bool = False
    max_images: int = Field(default=16, ge=0)
    max_image_bytes: int = Field(default=16 * 2**20, ge=1, le=MAX_IMAGE_BYTES)
    image_urls: ImageUrlSettings | None = None
    start_timeout_s: float = Field(default=60.0, gt=0)
    failover: FailoverSettings = FailoverSettings()

    @model_validator(mode="before")
    @classmethod
    def _no_plain_keys(cls, raw: Any) -> Any:
        """Ray writes `args` to its logs, dashboard and state."""
        if "api_keys" in raw:
            raise ValueError(
                "api_keys is not taken here, where Ray's logs would show it; give `api_keys_file`, "
                "or the environment variable CARAVAN_API_KEYS, with entries that "
                "`caravan key new NAME` prints"
            )
        return raw

    @field_validator("allowed_origins")
    @classmethod
    def _origins(cls, origins: tuple[str, ...]) -> tuple[str, ...]:
        for origin in origins:
            if not re.fullmatch(ORIGIN_PATTERN, origin):
                raise ValueError(
                    f"{origin!r} is no origin, such as https://chat.example.org without a path, "
                    "https://*.example.org:*, chrome-extension://* or *"
                )
        return origins

    @field_validator("allowed_hosts")
    @classmethod
    def _host_names(cls, hosts: tuple[str, ...] | None) -> tuple[str, ...] | None:
        for host in hosts or ():
            if not re.fullmatch(HOST_NAME_PATTERN, host):
                raise ValueError(
                    f"{host!r} is no name, such as llm.example.org without a port, *.example.org "
                    "or *"
                )
        return hosts

    @field_validator("models")
    @classmethod
    def _unique_names(
        cls, models: tuple[ModelSettings, ...], others: ValidationInfo
    ) -> tuple[ModelSettings, ...]:
        if not models and others.data.get("on_demand") is None:
            raise ValueError("at least one model is needed, or `on_demand`")
        seen: set[str] = set()
        for model in models:
            name = deployment_name(canonical_name(model.name))
            if name in seen:
                raise ValueError(f'two models are named "{model.name}", or all but so')
            seen.add(name)
        return models

    @field_validator("manage_models")
    @classmethod
    def _manageable(cls, manage: bool | None, others: ValidationInfo) -> bool | None:
        if manage and others.data.get("on_demand") is None:
            raise ValueError("there is no `on_demand`, whose models could be managed")
        return manage

    def caches_are_private(self, *, keyed: bool) -> bool:
        """Without keys all clients share one cache. `keyed`: whether there are API keys."""
        return keyed and not self.share_caches

    def models_are_managed(self, *, keyed: bool) -> bool:
        """`keyed`: whether there are API keys."""
        allowed = keyed if self.manage_models is None else self.manage_models
        return allowed and self.on_demand is not None


def canonical_name(name: str) -> str:
    """What two spellings of one model's name have in common: case, and the tag `latest`."""
    return name.lower().removesuffix(":latest")


def deployment_name(name: str) -> str:
    """The name as Serve accepts it."""
    return re.sub(r"[^A-Za-z0-9_.-]", "_", name)


def read_settings(args: Mapping[str, Any]) -> AppSettings:
    """Raises ConfigurationError: one line for each thing that is wrong, with its place."""
    try:
        return AppSettings.model_validate(dict(args))
    except ValidationError as error:
        lines = [_line(dict(details), args) for details in error.errors()]
        raise ConfigurationError("Configuration: " + "; ".join(lines)) from None


def source_path(source: str) -> Path:
    """Relative sources are relative to the directory that `serve run` was started in.

    Links are not followed: the parts of a split file are found by the name that was given.
    """
    return Path(source).expanduser().absolute()


def _parsed(source: str) -> Source:
    try:
        return parse_source(source)
    except SourceError as error:
        raise ValueError(str(error)) from None


def _line(details: dict[str, Any], args: Mapping[str, Any]) -> str:
    location = details["loc"]
    place = "args" + "".join(f"[{p}]" if isinstance(p, int) else f".{p}" for p in location)
    name = _model_name(location, args)
    place = f"{place} (model {name})" if name else place
    if details["type"] == "extra_forbidden":
        return f"{place} is not a known key{_nearest(location)}"
    if details["type"] == "missing":
        return f"{place} is missing"
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
        "autoscaling": AutoscalingSettings,
        "failover": FailoverSettings,
        "image_urls": ImageUrlSettings,
        "model": OnDemandModelSettings,
        "models": ModelSettings,
        "on_demand": OnDemandSettings,
        "parallel": ParallelSettings,
        "vision": VisionSettings,
    }
    owner = owners.get(names[-2], AppSettings) if len(names) > 1 else AppSettings
    close = difflib.get_close_matches(names[-1], owner.model_fields, n=1, cutoff=0.0)
    return f"; did you mean {close[0]}?" if close else ""
