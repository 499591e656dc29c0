"""The section `on_demand`: models of the store that are loaded on request."""

from typing import Annotated, Self

from pydantic import Field, field_validator, model_validator

from model_zoo.store.model_name import DEFAULT_HOST, HUB_HOST
from runtime.errors import RequestError
from serve_app.config.keep_alive import keep_alive_s
from serve_app.config.sections import AutoscalingSettings, Count, EngineSettings, Section
from serve_app.config.wrong_values import spelled

HUB_REGISTRY = "hf.co"  # the Hub's host for the registry protocol
_REPOSITORY = spelled(
    r"\*|[A-Za-z0-9_][A-Za-z0-9_.\-]*/(\*|[A-Za-z0-9_][A-Za-z0-9_.\-]*)",
    "a repository such as org/repo, org/* for all of an organisation, or * for all",
)
_HOST = spelled(
    r"[A-Za-z0-9_][A-Za-z0-9_.\-]{0,127}(:[0-9]{1,5})?",
    "a host such as hf.co or registry.example.org:5000, without https:// and path",
)


class OnDemandModelSettings(EngineSettings):
    """Engine settings of each model."""

    max_sequences: int = Field(default=4, ge=1)
    """Maximum number of running requests; further ones wait."""

    @model_validator(mode="after")
    def _without_draft(self) -> Self:
        if self.speculation.draft is not None:
            raise ValueError("speculation.draft belongs to one model; configure it under `models`")
        return self


class OnDemandSettings(Section):
    """Processes that each hold the most recently used models."""

    replicas: int | None = Count
    """Number of processes that load models; null: 1. A request goes to a process that has its model
    loaded, else to the one with the most free memory; if requests for a model queue, another
    process loads it too."""
    autoscaling: AutoscalingSettings | None = None
    """A number of processes that follows the load instead. Processes are also added after models
    were refused for lack of memory."""
    num_cpus: float | None = Field(default=None, ge=0)
    """CPUs that Ray reserves for each process; null: 1."""
    num_gpus: float | None = Field(default=None, ge=0)
    """GPUs that Ray reserves for each process; null: one if models are computed on GPUs."""
    max_loaded_bytes: int | None = Count
    """Memory limit of the models of one process, weights and caches; null: the memory that is free
    at its start, of a GPU the share in `num_gpus`. Set it if several processes share a machine."""
    max_models: int | None = Count
    """Maximum number of loaded models in one process."""
    keep_alive: str | int | float = "5m"
    """How long a model stays loaded after its last request: `10m`, seconds, -1 for ever, 0 not at
    all. A request's own `keep_alive` overrides it. An empty request loads the model, one with
    `keep_alive: 0` unloads it. A configured model stays loaded, but the reply is the same, so that
    `ollama stop` succeeds."""
    pull_hosts: tuple[Annotated[str, _HOST], ...] = (
        DEFAULT_HOST,
        HUB_HOST,
        HUB_REGISTRY,
    )
    """Hosts from which clients may pull models."""
    push_hosts: tuple[Annotated[str, _HOST], ...] | None = None
    """Hosts to which clients may push models, without a login; null: `pull_hosts`."""
    hf_token_for: tuple[Annotated[str, _REPOSITORY], ...] = ()
    """Repositories of the Hugging Face Hub for which clients' pulls use the server's token:
    `org/repo`, `org/*`, or `*` for all."""
    max_upload_bytes: int = Field(default=64 * 2**30, ge=1)
    """Limit of one file that a client uploads for `/api/create`."""
    upload_quota_bytes: int = Field(default=256 * 2**30, ge=1)
    """Limit of a client's uploaded files that no model uses yet; each counts 1 MiB at least. More
    gets 507, as does a full disk. Each process counts from its start."""
    model: OnDemandModelSettings = OnDemandModelSettings()
    """How each model is computed: the keys of models from `context_tokens` to `defaults`."""

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
