"""The section `on_demand`: models that are in the store and are loaded when they are asked for."""

from typing import Annotated, Self

from pydantic import Field, field_validator, model_validator

from model_zoo.store.model_name import DEFAULT_HOST, HUB_HOST
from runtime.errors import RequestError
from serve_app.config.keep_alive import keep_alive_s
from serve_app.config.sections import AutoscalingSettings, Count, EngineSettings, Section

HUB_REGISTRY = "hf.co"  # where the Hub speaks the protocol of registries
REPOSITORY_PATTERN = r"^(\*|[A-Za-z0-9_][A-Za-z0-9_.\-]*/(\*|[A-Za-z0-9_][A-Za-z0-9_.\-]*))$"
HOST_PATTERN = r"^[A-Za-z0-9_][A-Za-z0-9_.\-]{0,127}(:[0-9]{1,5})?$"


class OnDemandModelSettings(EngineSettings):
    """How each of the models is computed."""

    max_sequences: int = Field(default=4, ge=1)


class OnDemandSettings(Section):
    """Processes that each hold several models, those that were asked for last.

    `max_loaded_bytes`: what the models of one process may take, weights and caches; None: what the
    device has free when it starts, of a GPU the part that `num_gpus` says. `max_models` at once;
    None: as many as have room. `keep_alive`: how long a model stays after its last request, where
    that says nothing of it. `pull_hosts`: from where clients may have models pulled.
    `hf_token_for`: for which repositories of the Hub the server's token is used then, as
    `org/repo`, `org/*` or `*`.
    `max_upload_bytes`: of one file that a client brings. `upload_quota_bytes`: of a tenant's files
    that no model uses yet.
    """

    replicas: int | None = Count
    autoscaling: AutoscalingSettings | None = None
    num_cpus: float | None = Field(default=None, ge=0)
    num_gpus: float | None = Field(default=None, ge=0)
    max_loaded_bytes: int | None = Count
    max_models: int | None = Count
    keep_alive: str | int | float = "5m"
    pull_hosts: tuple[Annotated[str, Field(pattern=HOST_PATTERN)], ...] = (
        DEFAULT_HOST,
        HUB_HOST,
        HUB_REGISTRY,
    )
    hf_token_for: tuple[Annotated[str, Field(pattern=REPOSITORY_PATTERN)], ...] = ()
    max_upload_bytes: int = Field(default=64 * 2**30, ge=1)
    upload_quota_bytes: int = Field(default=256 * 2**30, ge=1)
    model: OnDemandModelSettings = OnDemandModelSettings()

    @field_validator("keep_alive")
    @classmethod
    def _known_duration(cls, value: str | int | float) -> str | int | float:
        try:
            keep_alive_s(value)
        except RequestError as error:
            raise ValueError(str(error)) from error
        return value

    @model_validator(mode="after")
    def _consistent(self) -> Self:
        if self.autoscaling is not None and self.replicas is not None:
            raise ValueError("replicas and autoscaling exclude each other")
        return self

    @property
    def keep_alive_s(self) -> float:
        seconds = keep_alive_s(self.keep_alive)
        assert seconds is not None
        return seconds
