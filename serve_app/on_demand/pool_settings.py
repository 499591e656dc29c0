"""The section `on_demand`: models of the store that are loaded on request."""

from typing import Annotated, Self

from pydantic import Field, field_validator, model_validator

from model_zoo.store.model_name import DEFAULT_HOST, HUB_HOST
from runtime.errors import RequestError
from serve_app.config.keep_alive import keep_alive_s
from serve_app.config.sections import AutoscalingSettings, Count, EngineSettings, Section

HUB_REGISTRY = "hf.co"  # the Hub's host for the registry protocol
REPOSITORY_PATTERN = r"^(\*|[A-Za-z0-9_][A-Za-z0-9_.\-]*/(\*|[A-Za-z0-9_][A-Za-z0-9_.\-]*))$"
HOST_PATTERN = r"^[A-Za-z0-9_][A-Za-z0-9_.\-]{0,127}(:[0-9]{1,5})?$"


class OnDemandModelSettings(EngineSettings):
    """Engine settings of each model."""

    max_sequences: int = Field(default=4, ge=1)


class OnDemandSettings(Section):
    """Processes that each hold several models, the most recently used ones.

    `max_loaded_bytes`: limit for weights and caches of the models of one process; None: the free
    memory of the device at the start, of a GPU the share `num_gpus`. `max_models`: how many models
    one process may hold; None: as many as fit. `keep_alive`: how long a model stays loaded after
    its last request, unless a request sets another. `pull_hosts`: where clients may pull from.
    `push_hosts`: where they may push to; None: `pull_hosts`. `hf_token_for`: repositories of the
    Hub for which those pulls use the server's token, as `org/repo`, `org/*` or `*`.
    `max_upload_bytes`: limit for one uploaded file. `upload_quota_bytes`: limit for a tenant's
    uploads that no model uses yet.
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
    push_hosts: tuple[Annotated[str, Field(pattern=HOST_PATTERN)], ...] | None = None
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
