"""The application's configuration: the `args` of a Serve config file, checked before any start."""

import difflib
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, Literal, Self

from pydantic import BaseModel, ConfigDict, Field, ValidationError, field_validator, model_validator

from model_zoo.sources.reference import HubSource, PathSource, Source, parse_source
from runtime.errors import ConfigurationError, RequestError, SourceError
from serve_app.options import Options, read_options

NAME_PATTERN = r"^[A-Za-z0-9_][A-Za-z0-9_.\-/]*(:[A-Za-z0-9_][A-Za-z0-9_.\-]*)?$"
# What decoders accept of a single file.
MAX_IMAGE_BYTES = 32 * 2**20
HOST_PATTERN = (
    r"^((\*\.)?[A-Za-z0-9_]([A-Za-z0-9._\-]*[A-Za-z0-9_])?|\[[0-9A-Fa-f:.]+\])(:[0-9]{1,5})?$"
)
Count = Field(default=None, ge=1)


class _Settings(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, protected_namespaces=())


class AutoscalingSettings(_Settings):
    """How many replicas a model has, by the requests each of them works on."""

    min_replicas: int = Field(default=1, ge=0)
    max_replicas: int = Field(default=1, ge=1)
    target_ongoing_requests: float = Field(default=8.0, gt=0)
    upscale_delay_s: float = Field(default=10.0, ge=0)
    downscale_delay_s: float = Field(default=300.0, ge=0)
    look_back_period_s: float = Field(default=30.0, gt=10)

    @model_validator(mode="after")
    def _ordered(self) -> Self:
        if self.min_replicas > self.max_replicas:
            raise ValueError("min_replicas is larger than max_replicas")
        return self


class ImageUrlSettings(_Settings):
    """Images that are fetched for requests, and from where; without these settings none are.

    `allowed_hosts`: names or addresses, `*.name` for all names below it, each with `:port` for
    another port than the scheme's own. `timeout_s` is for all of one image. `allow_private` lets
    hosts of this network and this machine be asked; it is meant for tests.
    """

    allowed_hosts: tuple[Annotated[str, Field(pattern=HOST_PATTERN)], ...] = Field(min_length=1)
    max_bytes: int = Field(default=8 * 2**20, ge=1, le=MAX_IMAGE_BYTES)
    timeout_s: float = Field(default=10.0, gt=0, le=300)
    max_redirects: int = Field(default=3, ge=0, le=20)
    allow_private: bool = False


class ModelSettings(_Settings):
    """One served model. None means: decided from the model file and the machine.

    `system`: for conversations that bring none; "" for none, even where the model has its own.
    `max_image_pixels` and `max_image_frames` are of one image; `image_cache_bytes` is what the
    features of images may take.
    """

    name: str = Field(pattern=NAME_PATTERN)
    source: str = Field(min_length=1)
    projector: str | None = None
    system: str | None = None
    context_tokens: int | None = Field(default=None, ge=2)
    device: Literal["auto", "cpu", "cuda"] = "auto"
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = "auto"
    kv_dtype: Literal["auto", "float32", "bfloat16", "float16"] = "auto"
    max_sequences: int = Field(default=16, ge=1)
    max_waiting: int = Field(default=512, ge=0)
    step_tokens: int = Field(default=512, ge=1)
    cache_tokens: int | None = Count
    page_tokens: int = Field(default=16, ge=1)
    prefix_cache: bool = True
    image_cache_bytes: int | None = Count
    max_image_pixels: int = Field(default=2**26, ge=1)
    max_image_frames: int = Field(default=1000, ge=1)
    threads: int | None = Count
    memory_bytes: int | None = Count
    num_cpus: float | None = Field(default=None, ge=0)
    num_gpus: float | None = Field(default=None, ge=0)
    replicas: int | None = Count
    autoscaling: AutoscalingSettings | None = None
    defaults: dict[str, Any] = Field(default_factory=dict)

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
        try:
            read_options(self.defaults)
        except RequestError as error:
            raise ValueError(f"defaults: {error}") from error
        return self

    @property
    def options(self) -> Options:
        return read_options(self.defaults)

    @property
    def brings_options(self) -> bool:
        """Whether the model may have parameters of its own."""
        return not isinstance(parse_source(self.source), PathSource)


class AppSettings(_Settings):
    """The whole application. `max_images` is of one request."""

    models: tuple[ModelSettings, ...]
    api_keys: tuple[str, ...] | None = None
    ingress_replicas: int = Field(default=1, ge=1)
    max_body_bytes: int = Field(default=32 * 2**20, ge=1024, le=128 * 2**20)
    max_images: int = Field(default=16, ge=0)
    max_image_bytes: int = Field(default=16 * 2**20, ge=1, le=MAX_IMAGE_BYTES)
    image_urls: ImageUrlSettings | None = None
    start_timeout_s: float = Field(default=60.0, gt=0)

    @field_validator("api_keys")
    @classmethod
    def _usable_keys(cls, keys: tuple[str, ...] | None) -> tuple[str, ...] | None:
        if keys is not None and (not keys or not all(keys)):
            raise ValueError("an empty list or an empty key would let nobody in; use null for open")
        return keys

    @field_validator("models")
    @classmethod
    def _unique_names(cls, models: tuple[ModelSettings, ...]) -> tuple[ModelSettings, ...]:
        if not models:
            raise ValueError("at least one model is needed")
        seen: set[str] = set()
        for model in models:
            name = deployment_name(canonical_name(model.name))
            if name in seen:
                raise ValueError(f'two models are named "{model.name}", or all but so')
            seen.add(name)
        return models


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
    owner: type[BaseModel] = AppSettings
    if names[:1] == ["image_urls"] and len(names) > 1:
        owner = ImageUrlSettings
    if names[:1] == ["models"] and len(names) > 1:
        owner = AutoscalingSettings if "autoscaling" in names[:-1] else ModelSettings
    close = difflib.get_close_matches(names[-1], owner.model_fields, n=1, cutoff=0.0)
    return f"; did you mean {close[0]}?" if close else ""
